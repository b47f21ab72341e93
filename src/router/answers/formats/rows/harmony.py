"""gpt-oss: messages in channels; a call is a message to `functions.N`."""

from __future__ import annotations

import re
from functools import partial

from router.answers.formats.events import CallEnded, Content, Reasoning
from router.answers.formats.format import CallForm, CallReader, Format
from router.answers.formats.source import Steps

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
_LONGEST_HEADER = 512
_ROLE, _CHANNELS = "assistant", ("analysis", "commentary", "final")
_RECIPIENT = r"to=([^\s\ud800-\udfff<{]+)"

_Kind = type[Content] | type[Reasoning]


def _turn(reader: CallReader) -> Steps[None]:
    source = reader.source
    headers = _Headers(reader)
    begins = tuple(map(reader.mark, (_START, _CHANNEL)))
    marks = (*begins, *map(reader.mark, (_END, _RETURN, _CALL)))
    # The prompt ends with the start of a message.
    mark = yield from source.literal(*begins, " to=")
    while True:
        kind: _Kind = Content
        if mark in (*begins, " to="):
            kind, name = yield from headers.read(mark)
            reader.is_reasoning = kind is Reasoning
            if name:
                yield from _read_call(reader, name)
        mark = yield from source.text_until(marks, partial(reader.say, kind))
        if not mark:
            return


class _Headers:
    """A message's start: role, channel, recipient, form."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._source = reader.source
        start, self._channel, constrain, self._message = map(reader.mark, (_START, _CHANNEL, _CONSTRAIN, _MESSAGE))
        self._ends = (self._message, start, *map(reader.mark, (_END, _RETURN, _CALL)))
        channel = f"{re.escape(self._channel)}({'|'.join(_CHANNELS)})?"
        words = f"{re.escape(start)}({_ROLE})?|{channel}|{_RECIPIENT}|({re.escape(constrain)})?json"
        self._word = re.compile(words)
        self._words = re.compile(rf"(\s*({words}))*\s*")

    def read(self, mark: str) -> Steps[tuple[_Kind, str]]:
        """Return the text's kind, and its function; misplaced text, or without its header's end, is content."""
        position = self._source.hold()
        found = yield from self._source.until(*self._ends, limit=_LONGEST_HEADER)
        if found is not None and found[1] == self._message:
            header = mark + found[0]
            left = self._word.sub("", header).strip()
            if " " in left:  # else it is the name of a form
                self._reader.say(Content, left)
            return self._understood(header)
        self._source.rewind(position)
        rest = self._source.rest
        words = self._words.match(mark + rest)
        header = words[0] if words else mark
        self._source.skip(len(header) - len(mark))
        if self._source.is_complete and self._is_cut(self._source.rest):
            self._source.skip(len(self._source.rest))
        kind, name = self._understood(header)
        return kind, name if self._source.rest.startswith("{") else ""

    def _understood(self, header: str) -> tuple[_Kind, str]:
        recipient = re.search(_RECIPIENT, header)
        channel = header.rpartition(self._channel)[2].strip()
        kind = Reasoning if channel.startswith(_CHANNELS[0]) else Content
        return kind, recipient[1].removeprefix("functions.") if recipient else ""

    def _is_cut(self, text: str) -> bool:
        return any(word.startswith(text) for word in (_ROLE, *_CHANNELS))


def _read_call(reader: CallReader, name: str) -> Steps[None]:
    reader.start(name)
    yield from reader.source.space()
    is_complete = yield from reader.source.json_value(reader.argue)
    yield from reader.source.space()
    reader.events.append(CallEnded(is_complete))
    reader.num_complete += is_complete


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
