"""Waiting entries of several API keys, whose keys take turns by the work that each has had.

The counters are those of "Fairness in Serving Large Language Models" (OSDI 2024): prompt tokens to compute, and
generated tokens, which cost twice as much, divided by the key's weight. Without keys it is one line in order of
arrival.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from router.scheduling.entry import Entry

_COST_OF_GENERATED = 2.0


@dataclass(slots=True)
class _Charged:
    """An entry that was taken, and what its key was charged for."""

    entry: Entry
    num_prompt: int
    num_generated: int


class FairLine:
    """A deque of entries whose next is the oldest of the key with the least work."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Entry]] = {}  # none is empty
        self._work: dict[str, float] = {}
        self._charged: dict[int, _Charged] = {}  # by request id, while it runs
        self._served_last = ""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries of the next key first."""
        if len(self._lanes) == 1:
            return iter(next(iter(self._lanes.values())))
        return (entry for key in sorted(self._lanes, key=self._turn) for entry in self._lanes[key])

    @property
    def first(self) -> Entry:
        return self._lanes[self._next_key()][0]

    def append(self, entry: Entry) -> None:
        """Add the youngest; a key without entries has saved nothing up by that."""
        key = entry.request.key
        lane = self._lanes.get(key)
        if lane is None:
            if key:
                others = [self._work_of(other) for other in self._lanes]
                least = min(others) if others else self._work_of(self._served_last)
                self._work[key] = max(self._work_of(key), least)
            lane = self._lanes[key] = deque()
        lane.append(entry)
        self._size += 1

    def appendleft(self, entry: Entry) -> None:
        """Put back, before others of its key, what it was charged for given back."""
        if self._charged:
            self._uncharge(entry)
        key = entry.request.key
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = deque()
        lane.appendleft(entry)
        self._size += 1

    def popleft(self) -> Entry:
        key = self._next_key()
        lane = self._lanes[key]
        entry = lane.popleft()
        if not lane:
            del self._lanes[key]
        self._size -= 1
        return entry

    def replace(self, entries: Iterable[Entry]) -> None:
        """Keep only these, in their order."""
        self._lanes = {}
        self._size = 0
        for entry in entries:
            self._lanes.setdefault(entry.request.key, deque()).append(entry)
            self._size += 1

    def charge(self, entry: Entry) -> None:
        """Charge a prompt that is taken, so that the next entry may be another key's."""
        charged = _Charged(entry, entry.num_to_compute, len(entry.generated_ids))
        self._charged[entry.request_id] = charged
        self._add(entry, charged.num_prompt)
        self._served_last = entry.request.key

    def charge_generated(self) -> None:
        """Charge what running entries have generated, and forget those that ended."""
        if not self._charged:
            return
        ended = [number for number, charged in self._charged.items() if self._settled(charged)]
        for number in ended:
            del self._charged[number]

    def _settled(self, charged: _Charged) -> bool:
        """Charge its new tokens; return whether it has ended."""
        entry = charged.entry
        num_generated = len(entry.generated_ids)
        if num_generated > charged.num_generated:
            self._add(entry, _COST_OF_GENERATED * (num_generated - charged.num_generated))
            charged.num_generated = num_generated
        return entry.done or entry.closed

    def _uncharge(self, entry: Entry) -> None:
        charged = self._charged.pop(entry.request_id, None)
        if charged is not None:
            self._settled(charged)
            self._add(entry, -charged.num_prompt)

    def _add(self, entry: Entry, cost: float) -> None:
        request = entry.request
        self._work[request.key] = self._work_of(request.key) + cost / request.weight

    def _work_of(self, key: str) -> float:
        return self._work.get(key, 0.0)

    def _turn(self, key: str) -> tuple[float, int]:
        return self._work_of(key), self._lanes[key][0].request_id

    def _next_key(self) -> str:
        lanes = self._lanes
        if len(lanes) == 1:
            return next(iter(lanes))
        # Written out: a server with many keys looks at every one that waits, for each request.
        work, found, least, oldest = self._work, "", math.inf, 0
        for key, lane in lanes.items():
            done = work.get(key, 0.0)
            if done < least or (done == least and lane[0].request_id < oldest):
                found, least, oldest = key, done, lane[0].request_id
        return found
