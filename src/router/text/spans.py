"""The tokens of a text with their places."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from tokenizers import Encoding


class TokenSpan(NamedTuple):
    """A token and its UTF-8 bytes."""

    id: int
    text: str
    start: int
    stop: int


class TokenSpans:
    """A text's tokens as numbers; objects would take fifty times the text."""

    def __init__(self, text: str, encoding: Encoding) -> None:
        self._text = text
        self._ids = array("I", encoding.ids)
        # In characters. One by one: a list of all is made without a break for the event loop.
        self._starts, self._stops = array("I"), array("I")
        for index in range(len(self._ids)):
            start, stop = encoding.token_to_chars(index) or (0, 0)  # None: an added special token
            self._starts.append(start)
            self._stops.append(stop)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[TokenSpan]:
        place = _BytePlace(self._text)
        for token_id, start, stop in zip(self._ids, self._starts, self._stops, strict=True):
            yield TokenSpan(token_id, self._text[start:stop], place.of(start), place.of(stop))


class _BytePlace:
    """Converts the library's characters to TGI's bytes, incrementally."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_ascii = text.isascii()
        self._character = self._byte = 0

    def of(self, character: int) -> int:
        if self._is_ascii:
            return character
        if character >= self._character:
            self._byte += len(self._text[self._character : character].encode())
        else:
            self._byte -= len(self._text[character : self._character].encode())
        self._character = character
        return self._byte
