"""Files in base64, set apart before JSON is parsed.

A parser holds the interpreter for ten milliseconds at megabytes; here it goes in pieces.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

_MARK = b";base64,"
_LONG = 1 << 18
_PIECE = 1 << 16
_RUN = re.compile(rb"[A-Za-z0-9+/=]*")


class Base64Runs:
    """Runs set apart, with unguessable words instead."""

    def __init__(self, raw: bytes) -> None:
        """Split raw UTF-8 with JSON strings into runs and `rest`."""
        self._word = secrets.token_hex(16)
        self._runs: list[str] = []
        parts: list[bytes] = []
        done = place = 0
        while (found := raw.find(_MARK, place)) >= 0:
            begin = found + len(_MARK)
            place = _end_of_run(raw, begin)
            if place - begin >= _LONG:
                parts += [raw[done:begin], f"<{self._word}{len(self._runs)}>".encode()]
                self._runs.append(raw[begin:place].decode("ascii"))
                done = place
        self.rest = b"".join((*parts, raw[done:])) if self._runs else raw

    def put_back(self, value: Any) -> Any:
        """Put runs back into parsed strings and names."""
        if not self._runs:
            return value
        if isinstance(value, str):
            return self._whole(value)
        if isinstance(value, list):
            return [self.put_back(one) for one in value]
        if isinstance(value, dict):
            return {self._whole(name): self.put_back(one) for name, one in value.items()}
        return value

    def _whole(self, text: str) -> str:
        pieces = text.split(f"<{self._word}")
        if len(pieces) == 1:
            return text
        parts = [pieces[0]]
        for piece in pieces[1:]:
            number, _, rest = piece.partition(">")
            parts += [self._runs[int(number)], rest]
        return "".join(parts)


def _end_of_run(raw: bytes, begin: int) -> int:
    while begin < len(raw):
        run = _RUN.match(raw, begin, begin + _PIECE)
        assert run is not None  # it may be empty
        if run.end() < begin + _PIECE:
            return run.end()
        begin = run.end()
    return begin
