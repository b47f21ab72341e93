"""Watches generated tokens for texts that wake a grammar."""

from __future__ import annotations

from collections import deque
from copy import copy
from itertools import accumulate

from llguidance import LLTokenizer

from wire.grammar import TextTrigger


class TextWatch:
    """The end of generated text, where a trigger may begin."""

    def __init__(self, trigger: TextTrigger, vocabulary: LLTokenizer) -> None:
        self._texts = tuple(text.encode() for text in trigger.texts)
        self._behind = None if trigger.behind is None else tuple(text.encode() for text in trigger.behind)
        self._longest = max(map(len, self._texts))
        self._vocabulary = vocabulary
        self._tokens: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._is_over = False  # the answer has begun with something else

    def add(self, token_id: int) -> list[int]:
        """Take a token; return those from where a completed text begins."""
        if self._is_over:
            return []
        piece: bytes = self._vocabulary.decode_bytes([token_id])
        self._tokens.append((token_id, piece))
        self._num_bytes += len(piece)
        tail = b"".join(piece for _, piece in self._tokens)
        places = [place for text in self._texts if (place := self._place(tail, text, len(piece))) >= 0]
        ends = accumulate(len(piece) for _, piece in self._tokens)
        begun = [number for (number, _), end in zip(self._tokens, ends, strict=True) if places and end > min(places)]
        self._forget(tail)
        return begun

    def before_trigger(self, token_ids: list[int]) -> list[int]:
        """Return these tokens up to a complete text."""
        ahead = copy(self)
        ahead._tokens = self._tokens.copy()
        for number, token_id in enumerate(token_ids):
            if ahead.add(token_id):
                return token_ids[:number]
        return token_ids

    def _place(self, tail: bytes, text: bytes, num_new: int) -> int:
        """Return where a text ending in the newest bytes begins; -1: nowhere."""
        place = tail.find(text, max(0, len(tail) - num_new - len(text) + 1))
        if place >= 0 and self._behind is not None and tail[:place].strip() not in self._behind:
            return -1
        return place

    def _forget(self, tail: bytes) -> None:
        """Drop tokens where no text can begin."""
        if self._behind is not None:
            start = tail.lstrip()
            self._is_over = not any((one + text).startswith(start) for one in self._behind for text in self._texts)
            return
        while self._num_bytes - len(self._tokens[0][1]) >= self._longest:
            self._num_bytes -= len(self._tokens.popleft()[1])
