"""Gemma's calls: `call:NAME{key:value,...}`, bare keys, own string marks."""

from __future__ import annotations

import json
import re

from router.answers.formats.format import CallReader
from router.answers.formats.pieces.names import name_before
from router.answers.formats.source import Steps

_MAX_DEPTH = 64
_UNFINISHED_NUMBER = re.compile(r"^(-?\d+)\.$")


def bare_keys_call(reader: CallReader, quote: str, close: str, *, typed: bool) -> Steps[bool]:
    """Read a call; `typed`: marked text is JSON unless a string."""
    if not (yield from reader.space_and("call:")):
        return False
    name, mark = yield from name_before(reader, "{")
    if not mark:
        return False
    reader.start(name)
    values = _Values(reader, reader.mark(quote), name if typed else None)
    if not (yield from values.members(0)):
        return False
    yield from reader.space_and(close)  # some calls end with the turn instead
    return True


class _Values:
    """Passes on values as JSON."""

    def __init__(self, reader: CallReader, quote: str, typed_name: str | None) -> None:
        self._reader = reader
        self._source = reader.source
        self._quote = quote
        self._typed_name = typed_name

    def members(self, depth: int) -> Steps[bool]:
        """Behind the `{`, to the `}`."""
        self._reader.argue("{")
        if (yield from self._reader.space_and("}")):
            self._reader.argue("}")
            return True
        while True:
            found = yield from self._source.until(":")
            if found is None:
                return False
            key = self._reader.visible(found[0].replace(self._quote, "")).strip().strip('"')
            self._reader.argue(json.dumps(key, ensure_ascii=False) + ": ")
            if not (yield from self._value(depth, key)):
                return False
            mark = yield from self._reader.space_and(",", "}")
            if mark != ",":
                self._reader.argue(mark)
                return bool(mark)
            self._reader.argue(", ")

    def _value(self, depth: int, key: str) -> Steps[bool]:
        yield from self._source.space()
        mark = yield from self._source.literal(self._quote, "{", "[", '"')
        if mark == self._quote:
            return (yield from self._string(key if depth == 0 else None))
        if mark and depth == _MAX_DEPTH:
            return False
        if mark == "{":
            return (yield from self.members(depth + 1))
        if mark == "[":
            return (yield from self._items(depth + 1))
        return (yield from self._scalar(mark))

    def _items(self, depth: int) -> Steps[bool]:
        self._reader.argue("[")
        if (yield from self._reader.space_and("]")):
            self._reader.argue("]")
            return True
        while (yield from self._value(depth, "")):
            mark = yield from self._reader.space_and(",", "]")
            self._reader.argue(", " if mark == "," else mark)
            if mark != ",":
                return bool(mark)
        return False

    def _string(self, key: str | None) -> Steps[bool]:
        types = None
        if self._typed_name is not None and key is not None:
            types = self._reader.types.of(self._typed_name, key)
        if types is None or types == {"string"}:
            self._reader.argue('"')
            if not (yield from self._source.text_until((self._quote,), self._say_escaped)):
                return False
            self._reader.argue('"')
            return True
        pieces: list[str] = []
        found = yield from self._source.text_until((self._quote,), pieces.append)
        self._reader.argue(self._reader.types.json_of(self._reader.visible("".join(pieces)), types))
        return bool(found)

    def _say_escaped(self, text: str) -> None:
        self._reader.argue(json.dumps(self._reader.visible(text), ensure_ascii=False)[1:-1])

    def _scalar(self, begin: str) -> Steps[bool]:
        """Read a number or word; `begin`: a quote of plain JSON."""
        text = begin
        while (character := (yield from self._source.peek())) and (begin or character not in ",}]"):
            self._source.skip(1)
            text += character
            if begin and character == '"' and not text.endswith('\\"'):
                break
        text = self._reader.visible(text.strip())
        text = _UNFINISHED_NUMBER.sub(r"\1", text)
        try:
            json.loads(text)
        except ValueError:
            text = json.dumps(text, ensure_ascii=False)
        self._reader.argue(text)
        return bool(character)
