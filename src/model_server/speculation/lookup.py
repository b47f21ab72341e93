"""Drafts from the request's own tokens: what followed the last time that its newest tokens occurred, or follows them in
the answer that the request foretells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Equal tokens before a place beyond which a longer match says nothing more.
_LONGEST_MATCH = 8
# The most tokens that are drafted after a match of 1, 2 and 3 tokens: chance explains short ones.
_MOST_AFTER = (1, 2, 4)
_FIRST_ROOM = 256

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Guess:
    """Drafted tokens, and of how many equal tokens the match was that they followed."""

    ids: list[int]
    matched: int


NO_GUESS = Guess([], 0)


class History:
    """The tokens of one request, prompt and generated."""

    def __init__(self) -> None:
        self._ids = np.zeros(_FIRST_ROOM, np.int64)
        self._length = 0

    def follow(self, ids: Sequence[int]) -> None:
        """Bring it to `ids`, which continue what it has."""
        length = len(ids)
        if length > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(length, np.int64)])
        self._ids[self._length : length] = ids[self._length :]
        self._length = length

    def end(self, forced: Sequence[int] = ()) -> Ids:
        """Its last tokens, as many as a match may have, `forced` being the newest."""
        last = self._ids[max(0, self._length - _LONGEST_MATCH) : self._length]
        return np.concatenate([last, np.asarray(forced, np.int64)])[-_LONGEST_MATCH:] if forced else last

    def draft(self, most: int, forced: Sequence[int] = ()) -> list[int]:
        """At most `most` tokens that may follow its tokens and `forced`: those behind the longest match of its end, of
        equal ones the latest. A draft that reaches the end of the history continues in itself, so periods repeat."""
        return self.guess(most, forced).ids

    def guess(self, most: int, forced: Sequence[int] = ()) -> Guess:
        """`draft`, and how long the match is."""
        ids, length = self._ids, self._length
        if forced:
            ids = np.concatenate([ids[:length], np.asarray(forced, np.int64)])
            length += len(forced)
        if length < 2 or most < 1:
            return NO_GUESS
        places, matched = _matches(ids[: length - 1], ids[max(0, length - _LONGEST_MATCH) : length])
        if not matched:
            return NO_GUESS
        most = _bounded(most, matched)
        first = int(places[-1]) + 1
        found: list[int] = ids[first : min(first + most, length)].tolist()
        period = length - first
        while len(found) < most:
            found.append(found[len(found) - period])
        return Guess(found, matched)


class Prediction:
    """The tokens that a request says its answer will probably have."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.asarray(ids, np.int64)

    def guess(self, most: int, end: Ids, num_generated: int) -> Guess:
        """At most `most` tokens that may follow `end`: those behind its longest match, of equal ones the one that is
        nearest to where the answer is, at `num_generated` tokens. An answer that is the beginning of the prediction
        continues as that does, however short it is."""
        if most < 1 or not len(self._ids) or not len(end):
            return NO_GUESS
        places, matched = _matches(self._ids, end)
        if not matched:
            return NO_GUESS
        place = int(places[np.abs(places + 1 - num_generated).argmin()])
        if not (place + 1 == num_generated == matched):
            most = _bounded(most, matched)
        return Guess(self._ids[place + 1 : place + 1 + most].tolist(), matched)


def _matches(ids: Ids, end: Ids) -> tuple[Ids, int]:
    """Where in `ids` the longest matches of `end`'s last tokens have their last token, rising, and how long these are;
    0: there are none."""
    places, matched = np.flatnonzero(ids == end[-1]), 1
    if not len(places):
        return places, 0
    while matched < len(end):
        longer = places[places >= matched]
        longer = longer[ids[longer - matched] == end[-1 - matched]]
        if not len(longer):
            break
        places, matched = longer, matched + 1
    return places, matched


def _bounded(most: int, matched: int) -> int:
    return min(most, _MOST_AFTER[matched - 1]) if matched <= len(_MOST_AFTER) else most
