"""gpt-oss: messages in channels; a call is a message to `functions.N`."""

from __future__ import annotations

import re
from functools import partial

from router.openai.formats.events import CallEnded, Content, Reasoning
from router.openai.formats.format import CallForm, CallReader, Format
from router.openai.formats.source import Steps

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
_LONGEST_HEADER = 1024
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s\ud800-\udfff<]+)")


def _turn(reader: CallReader) -> Steps[None]:
    source = reader.source
    begins = tuple(map(reader.mark, (_START, _CHANNEL)))
    marks = (*begins, *map(reader.mark, (_END, _RETURN, _CALL)))
    # The prompt ends with the start of a message.
    mark = yield from source.literal(*begins, " to=")
    is_header = bool(mark)
    while True:
        kind: type[Content] | type[Reasoning] = Content
        if is_header:
            header = yield from source.until(reader.mark(_MESSAGE), limit=_LONGEST_HEADER)
            if header is None:
                # Cut in a mark, or no header at all.
                mark = yield from source.text_until(marks, _drop if source.is_complete else partial(reader.say, kind))
                if not mark:
                    return
                is_header = mark in begins
                continue
            kind, name = _understood(reader, mark + header[0])
            if name:
                yield from _read_call(reader, name)
        reader.is_reasoning = kind is Reasoning
        mark = yield from source.text_until(marks, partial(reader.say, kind))
        if not mark:
            return
        is_header = mark in begins


def _understood(reader: CallReader, header: str) -> tuple[type[Content] | type[Reasoning], str]:
    """What kind of text a message has, and the function that it calls, if any."""
    recipient = _RECIPIENT.search(header)
    channel = header.rpartition(reader.mark(_CHANNEL))[2].strip()
    kind = Reasoning if channel.startswith("analysis") else Content
    return kind, recipient[1].removeprefix("functions.") if recipient else ""


def _read_call(reader: CallReader, name: str) -> Steps[None]:
    reader.start(name)
    yield from reader.source.space()
    is_complete = yield from reader.source.json_value(reader.argue)
    yield from reader.source.space()
    reader.events.append(CallEnded(is_complete))
    reader.num_complete += is_complete


def _drop(text: str) -> None:
    """Part of a mark."""


def _read(reader: CallReader, opener: str) -> Steps[None]:
    """Nothing: `_turn` reads the whole answer."""
    yield from ()


FORMAT = Format(
    name="harmony",
    aliases=("openai", "gpt-oss", "gpt_oss"),
    openers=(),
    closers=(_END, _RETURN, _CALL),
    others=(_START, _CHANNEL, _CONSTRAIN, _MESSAGE),
    is_one=True,
    describes=True,
    signs=lambda template: _CHANNEL in template,
    form=CallForm(
        before_name=_CHANNEL + "commentary to=functions.",
        behind_name=" " + _CONSTRAIN + "json" + _MESSAGE,
        behind_arguments=_CALL,
        answers=_CHANNEL + "final" + _MESSAGE,
        thinks=(_CHANNEL + "analysis" + _MESSAGE, _END + _START + "assistant"),
    ),
    read=_read,
    turn=_turn,
)
