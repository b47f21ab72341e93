"""An answer's text so far, for generators that yield where more is needed, and end once it `is_complete`."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Say = Callable[[str], None]

_CLOSING = {"{": "}", "[": "]"}
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class Source:
    """Text and a position; `hold` allows `rewind`."""

    def __init__(self) -> None:
        self.is_complete = False
        self._text = ""
        self._position = 0
        self._num_holds = 0

    @property
    def rest(self) -> str:
        return self._text[self._position :]

    def push(self, text: str) -> None:
        if not self._num_holds and self._position:
            self._text, self._position = self.rest, 0
        self._text += text

    def skip(self, count: int) -> None:
        self._position += count

    def hold(self) -> int:
        self._num_holds += 1
        return self._position

    def release(self) -> None:
        """Ends all holding."""
        self._num_holds = 0

    def rewind(self, position: int) -> None:
        """To what `hold` returned; ends that holding."""
        self._num_holds -= 1
        self._position = position

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self._position == len(self._text):
            if self.is_complete:
                return ""
            yield
        return self._text[self._position]

    def space(self) -> Steps[None]:
        """Skips white space."""
        while (yield from self.peek()).isspace():
            self._position += 1

    def literal(self, *options: str) -> Steps[str]:
        """Read the first next option; "": none."""
        while True:
            rest = self.rest[: max(map(len, options))]
            for option in options:
                if rest.startswith(option):
                    self._position += len(option)
                    return option
            if self.is_complete or not any(option.startswith(rest) for option in options):
                return ""
            yield

    def until(self, *marks: str, limit: int = 256) -> Steps[tuple[str, str] | None]:
        """Read to the first mark within `limit`; else None, unread."""
        seen = self._position
        longest = max(map(len, marks))
        while True:
            found = [(place, mark) for mark in marks if (place := self._text.find(mark, seen)) >= 0]
            place, mark = min(found, default=(len(self._text), ""))
            if place - self._position > limit:
                return None
            if mark:
                text = self._text[self._position : place]
                self._position = place + len(mark)
                return text, mark
            if self.is_complete:
                return None
            seen = max(self._position, len(self._text) - longest + 1)
            start = self._position
            yield
            seen -= start - self._position  # what was read before may have been dropped

    def text_until(self, marks: tuple[str, ...], say: Say) -> Steps[str]:
        """Pass text to the first mark, which is returned; "" at the end."""
        while True:
            rest = self.rest
            found = [(place, mark) for mark in marks if (place := rest.find(mark)) >= 0]
            place, mark = min(found, default=(len(rest) - (0 if self.is_complete else overlap(rest, marks)), ""))
            if place:
                say(rest[:place])
            self._position += place + len(mark)
            if mark or self.is_complete:
                return mark
            yield

    def json_string(self) -> Steps[str | None]:
        """Read a JSON string, if there is one."""
        pieces: list[str] = []
        if (yield from self.peek()) != '"' or not (yield from self.json_value(pieces.append)):
            return None
        try:
            value: str = json.loads("".join(pieces), strict=False)
        except ValueError:
            return None
        return value

    def json_value(self, say: Say) -> Steps[bool]:
        """Pass on a JSON value; False: cut or malformed."""
        first = yield from self.peek()
        if first == '"':
            return (yield from self._json_string(say))
        if first in ("{", "["):
            return (yield from self._json_nested(say))
        return (yield from self._json_scalar(say))

    def _json_scalar(self, say: Say) -> Steps[bool]:
        text = ""
        while (character := (yield from self.peek())) in _SCALAR and character:
            self._position += 1
            text += character
        if text:
            say(text)
        try:
            json.loads(text)
        except ValueError:
            return False
        return True

    def _json_string(self, say: Say) -> Steps[bool]:
        escaped, start, place = False, self._position, self._position + 1
        while True:
            while place < len(self._text):
                character = self._text[place]
                place += 1
                if escaped:
                    escaped = False
                elif character == "\\":
                    escaped = True
                elif character == '"':
                    say(self._text[start:place])
                    self._position = place
                    return True
            if place > start:
                say(self._text[start:place])
            self._position = place
            if self.is_complete:
                return False
            yield
            start = place = self._position

    def _json_nested(self, say: Say) -> Steps[bool]:
        open_ones: list[str] = []
        while True:
            character = yield from self.peek()
            if character == '"':
                if not (yield from self._json_string(say)):
                    return False
                continue
            if character in _CLOSING:
                open_ones.append(_CLOSING[character])
            elif character in ("}", "]"):
                if open_ones.pop() != character:
                    return False
            elif not (character.isspace() or character in _SCALAR or character in ",:") or not character:
                return False
            self._position += 1
            say(character)
            if not open_ones:
                return True


def overlap(text: str, marks: tuple[str, ...]) -> int:
    """Return the longest end of `text` that begins a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(text), len(mark) - 1), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest
