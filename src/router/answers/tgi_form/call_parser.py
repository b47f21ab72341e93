"""Reads a tool call as generated: `{"function": {"_name": NAME, ...arguments}}`.

The grammar fixes form and order; white space between tokens is dropped.
"""

from __future__ import annotations

import json
from enum import Enum, auto

NAME_KEY = "_name"
_HEAD = ("{", '"function"', ":", "{", f'"{NAME_KEY}"', ":")
_WHITE_SPACE = " \t\r\n"


class _State(Enum):
    HEAD = auto()  # the tokens before the name
    NAME = auto()
    AFTER_NAME = auto()
    ARGUMENTS = auto()
    TAIL = auto()  # the outer object's end
    COMPLETE = auto()
    MALFORMED = auto()


class ToolCallParser:
    """Takes text, and returns the arguments so far."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._state = _State.HEAD
        self._num_head_tokens = 0
        self._token = ""  # of the head or the name, as far as it has come
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def is_complete(self) -> bool:
        return self._state is _State.COMPLETE

    @property
    def is_malformed(self) -> bool:
        return self._state is _State.MALFORMED

    def feed(self, text: str) -> str:
        """Return the next part of the arguments' one JSON object."""
        return "".join([self._read(character) for character in text])

    def _read(self, character: str) -> str:
        if self._state is _State.ARGUMENTS:
            return self._argument(character)
        if character in _WHITE_SPACE and not self._token:
            return ""
        if self._state is _State.HEAD:
            self._head(character)
        elif self._state is _State.NAME:
            self._read_name(character)
        elif self._state is _State.AFTER_NAME:
            return self._after_name(character)
        elif self._state is _State.TAIL and character == "}":
            self._state = _State.COMPLETE
        else:
            self._state = _State.MALFORMED
        return ""

    def _head(self, character: str) -> None:
        self._token += character
        expected = _HEAD[self._num_head_tokens]
        if self._token == expected:
            self._token = ""
            self._num_head_tokens += 1
            if self._num_head_tokens == len(_HEAD):
                self._state = _State.NAME
        elif not expected.startswith(self._token):
            self._state = _State.MALFORMED

    def _read_name(self, character: str) -> None:
        self._token += character
        if self._token == '"':
            return
        if not self._token.startswith('"'):
            self._state = _State.MALFORMED
        elif self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._end_name()

    def _end_name(self) -> None:
        try:
            self.name = json.loads(self._token)
        except ValueError:
            self._state = _State.MALFORMED
        else:
            self._state = _State.AFTER_NAME
        self._token = ""

    def _after_name(self, character: str) -> str:
        if character == ",":
            self._state, self._depth = _State.ARGUMENTS, 1
            return "{"
        if character == "}":
            self._state = _State.TAIL
            return "{}"
        self._state = _State.MALFORMED
        return ""

    def _argument(self, character: str) -> str:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return character
        if character in _WHITE_SPACE:
            return ""
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._state = _State.TAIL
        return character
