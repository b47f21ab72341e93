"""Drafts from the request's own tokens: what followed the last time that its newest tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Equal tokens before a place beyond which a longer match says nothing more.
_LONGEST_MATCH = 8
# The most tokens that are drafted after a match of 1, 2 and 3 tokens: chance explains short ones.
_MOST_AFTER = (1, 2, 4)
_FIRST_ROOM = 256


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

    def draft(self, most: int, forced: Sequence[int] = ()) -> list[int]:
        """At most `most` tokens that may follow its tokens and `forced`: those behind the longest match of its end, of
        equal ones the latest. A draft that reaches the end of the history continues in itself, so periods repeat."""
        ids, length = self._ids, self._length
        if forced:
            ids = np.concatenate([ids[:length], np.asarray(forced, np.int64)])
            length += len(forced)
        if length < 2 or most < 1:
            return []
        places = np.flatnonzero(ids[: length - 1] == ids[length - 1])
        if not len(places):
            return []
        matched = 1
        while matched < _LONGEST_MATCH:
            longer = places[places >= matched]
            longer = longer[ids[longer - matched] == ids[length - 1 - matched]]
            if not len(longer):
                break
            places, matched = longer, matched + 1
        if matched <= len(_MOST_AFTER):
            most = min(most, _MOST_AFTER[matched - 1])
        first = int(places[-1]) + 1
        found: list[int] = ids[first : min(first + most, length)].tolist()
        period = length - first
        while len(found) < most:
            found.append(found[len(found) - period])
        return found
