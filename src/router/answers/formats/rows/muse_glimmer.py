"""Muse Glimmer: messages to recipients; a call is a message to the function, with a block of `atem:invoke` in it."""

from __future__ import annotations

import re
from functools import partial

from router.answers.formats.events import Content, Reasoning
from router.answers.formats.format import SAME_NAME, ArgumentsForm, CallForm, CallReader, Format, Values
from router.answers.formats.pieces.tagged import Tags, tagged_calls
from router.answers.formats.source import Steps

_START, _MESSAGE, _NEXT, _END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_OPEN, _CLOSE = "<atem:function_calls>", "</atem:function_calls>"
_TO, _SELF = " to=", "self"
_LONGEST_HEADER = 512
_RECIPIENT = re.compile(r"\bto=([^\s\ud800-\udfff<]+)")
_CUT = re.compile(r"(a\w*)?\s*(t|to|to=)?[^\s<]*")
"""A header that an answer ends within."""
_TAGS = Tags(
    call=('<atem:invoke name="',),
    behind_name=('">',),
    key='<atem:parameter name="',
    behind_key='">',
    behind_value="</atem:parameter>",
    call_end="</atem:invoke>",
    ends=(_CLOSE,),
    may_double=True,
)

_Kind = type[Content] | type[Reasoning]


def _turn(reader: CallReader) -> Steps[None]:
    source = reader.source
    opens = reader.mark(_OPEN)
    begins = (reader.mark(_START), reader.mark(_MESSAGE))
    ends = (*begins, reader.mark(_NEXT), reader.mark(_END))
    # The prompt ends within the header of a message.
    mark = yield from source.literal(*begins, _TO, _TO.strip())
    kind: _Kind = Content
    while True:
        if mark in (*begins, _TO, _TO.strip()):
            kind = yield from _kind(reader, mark)
            reader.is_reasoning = kind is Reasoning
        # What is written in a thought is no call.
        marks = ends if kind is Reasoning else (opens, *ends)
        mark = yield from source.text_until(marks, partial(reader.say, kind))
        if mark == opens:
            yield from _calls(reader)
        if not mark:
            return


def _kind(reader: CallReader, mark: str) -> Steps[_Kind]:
    """Read the rest of a header; one without an end is content."""
    source, message = reader.source, reader.mark(_MESSAGE)
    header = mark
    if mark != message:
        position = source.hold()
        ends = (message, *map(reader.mark, (_START, _NEXT, _END)))
        found = yield from source.until(*ends, limit=_LONGEST_HEADER)
        if found is None or found[1] != message:
            source.rewind(position)
            if source.is_complete and _CUT.fullmatch(source.rest):
                source.skip(len(source.rest))
            elif mark != reader.mark(_START):
                reader.say(Content, mark)
            return Content
        source.release()
        header = found[0] if mark == reader.mark(_START) else mark + found[0]
    recipient = _RECIPIENT.search(header)
    return Reasoning if recipient is not None and recipient[1] == _SELF else Content


def _calls(reader: CallReader) -> Steps[None]:
    before = reader.num_started
    yield from tagged_calls(reader, _TAGS, reader.mark(_OPEN))
    if reader.num_started == before:
        reader.say(Content, reader.mark(_OPEN))
    else:
        yield from reader.source.space()


def _read(reader: CallReader, opener: str) -> Steps[None]:
    """Nothing: `_turn` reads the whole answer."""
    yield from ()


FORMAT = Format(
    name="muse_glimmer",
    aliases=("muse", "museglimmer"),
    openers=(),
    closers=(_NEXT, _END),
    others=(_START, _MESSAGE),
    signs=lambda template: "atem:function_calls" in template,
    form=CallForm(
        before_name=_TO,
        behind_name=f'{_MESSAGE}{_OPEN}\n<atem:invoke name="{SAME_NAME}">\n',
        behind_arguments=f"</atem:invoke>\n{_CLOSE}",
        between=f"{_NEXT}{_START}assistant",
        answers=f"{_TO}user{_MESSAGE}",
        thinks=(f"{_TO}{_SELF}{_MESSAGE}", f"{_NEXT}{_START}assistant"),
        arguments=ArgumentsForm(
            values=Values.TAGGED,
            before_key=_TAGS.key,
            behind_key=_TAGS.behind_key,
            behind_value=f"{_TAGS.behind_value}\n",
            ends_text=(_TAGS.behind_value,),
        ),
    ),
    read=_read,
    turn=_turn,
)
