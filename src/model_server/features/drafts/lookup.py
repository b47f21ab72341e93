"""Drafts from what followed the newest tokens before, or follows them in a foretold answer."""

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
# Of more places than this arrays find the longest matches sooner.
_MOST_PLACES = 40

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Guess:
    """Drafted tokens, and the length of the match before them."""

    ids: list[int]
    matched: int


NO_GUESS = Guess([], 0)


class History:
    """One request's tokens, with pairs and last places: most new pairs need no search."""

    def __init__(self) -> None:
        self._ids: Sequence[int] = ()
        self._length = 0
        self._searched = np.zeros(_FIRST_ROOM, np.int64)  # the same, as far as a search has needed them
        self._num_searched = 0
        # Of all tokens but the newest one.
        self._last: dict[int, int] = {}
        self._pairs: set[tuple[int, int]] = set()

    def follow(self, ids: Sequence[int]) -> None:
        """Keep and continue with `ids`, which may grow."""
        known, self._ids, self._length = self._length, ids, len(ids)
        for place in range(max(known - 1, 0), self._length - 1):
            token = ids[place]
            self._last[token] = place
            if place:
                self._pairs.add((ids[place - 1], token))

    def end(self, forced: Sequence[int] = ()) -> list[int]:
        """Return its last tokens, `forced` the newest, as many as match."""
        last = self._ids[max(0, self._length - _LONGEST_MATCH) : self._length]
        return [*last, *forced][-_LONGEST_MATCH:]

    def draft(self, most: int, forced: Sequence[int] = ()) -> list[int]:
        """Draft at most `most` tokens behind the latest longest match, continuing periods."""
        return self.guess(most, forced).ids

    def guess(self, most: int, forced: Sequence[int] = ()) -> Guess:
        """`draft`, and how long the match is."""
        length = self._length
        if length + len(forced) < 2 or most < 1:
            return NO_GUESS
        if not forced:
            newest = self._ids[length - 1]
            if newest not in self._last:
                return NO_GUESS
            if (self._ids[length - 2], newest) not in self._pairs:
                return Guess([self._ids[self._last[newest] + 1]], 1)
        ids = self._array()
        if forced:
            ids = np.concatenate([ids, np.asarray(forced, np.int64)])
        places, matched = _matches(ids[:-1], ids[-_LONGEST_MATCH:])
        return _behind(ids, int(places[-1]), matched, most) if matched else NO_GUESS

    def _array(self) -> Ids:
        length, known = self._length, self._num_searched
        if length > len(self._searched):
            self._searched = np.concatenate([self._searched, np.zeros(length, np.int64)])
        self._searched[known:length] = self._ids[known:length]
        self._num_searched = length
        return self._searched[:length]


class Prediction:
    """An answer's probable tokens."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)
        self._array = np.asarray(ids, np.int64)
        self._places: dict[int, list[int]] = {}  # of each token, rising
        for place, token in enumerate(ids):
            self._places.setdefault(token, []).append(place)

    def guess(self, most: int, end: Sequence[int], num_generated: int) -> Guess:
        """Guess what follows `end`, at the longest match nearest to `num_generated`. A prediction's beginning
        continues, however short.
        """
        found = self._places.get(end[-1]) if most > 0 and end else None
        if found is None:
            return NO_GUESS
        if len(found) > _MOST_PLACES:
            places, matched = _matches(self._array, np.asarray(end, np.int64))
            place = int(places[np.abs(places + 1 - num_generated).argmin()])
        else:
            place = max(found, key=lambda one: (self._matched(one, end), -abs(one + 1 - num_generated)))
            matched = self._matched(place, end)
        if not (place + 1 == num_generated == matched):
            most = _bounded(most, matched)
        return Guess(self._ids[place + 1 : place + 1 + most], matched)

    def _matched(self, place: int, end: Sequence[int]) -> int:
        """Count `end`'s last tokens that match up to this place."""
        most = min(len(end), place + 1)
        for count in range(1, most):
            if self._ids[place - count] != end[-1 - count]:
                return count
        return most


def _matches(ids: Ids, end: Ids) -> tuple[Ids, int]:
    """Return where the longest matches of `end` are, rising, and their length; 0: none."""
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


def _behind(ids: Ids, place: int, matched: int, most: int) -> Guess:
    """Return what followed a match."""
    most, first = _bounded(most, matched), place + 1
    found: list[int] = ids[first : first + most].tolist()
    period = len(ids) - first
    while len(found) < most:
        found.append(found[len(found) - period])
    return Guess(found, matched)


def _bounded(most: int, matched: int) -> int:
    return min(most, _MOST_AFTER[matched - 1]) if matched <= len(_MOST_AFTER) else most
