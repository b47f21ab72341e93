"""Waiting entries by priority, and those of several API keys, which take turns by the work that each has had.

The counters are those of "Fairness in Serving Large Language Models" (OSDI 2024): prompt tokens to compute, and
generated tokens, which cost twice as much, divided by the key's weight. Without keys and priorities it is one line
in order of arrival.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakSet

from router.scheduling.entry import Entry

_COST_OF_GENERATED = 2.0

_Lane = tuple[int, str]
"""The priority of its entries, of which lower ones are first, and their key."""


@dataclass(slots=True)
class _Charged:
    """An entry that was taken, and what its key was charged for."""

    entry: Entry
    num_prompt: int
    num_generated: int


class KeyWork:
    """The work that each key has had, in the lines of all replicas."""

    def __init__(self) -> None:
        self.of_key: dict[str, float] = {}
        self.served_last = ""
        self.lines: WeakSet[FairLine] = WeakSet()  # those of replicas that have failed go

    @property
    def waiting(self) -> set[str]:
        """Return the keys that have an entry in a line."""
        return {key for line in self.lines for key in line.sizes()}


class FairLine:
    """A deque of entries whose next is, of the most urgent, the oldest of the key with the least work."""

    def __init__(self, key_work: KeyWork | None = None) -> None:
        self._lanes: dict[_Lane, deque[Entry]] = {}  # none is empty
        self._shared = key_work or KeyWork()
        self._shared.lines.add(self)
        self._work = self._shared.of_key
        self._charged: dict[int, _Charged] = {}  # by request id, while it runs
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries of the next lane first."""
        if len(self._lanes) == 1:
            return iter(next(iter(self._lanes.values())))
        return (entry for lane in sorted(self._lanes, key=self._turn) for entry in self._lanes[lane])

    @property
    def first(self) -> Entry:
        return self._lanes[self._next_lane()][0]

    def append(self, entry: Entry) -> None:
        """Add the youngest; a key without entries has saved nothing up by that."""
        lane = self._lanes.get(_lane_of(entry))
        if lane is None:
            if key := entry.request.key:
                self._lift(key)
            lane = self._lanes[_lane_of(entry)] = deque()
        lane.append(entry)
        self._size += 1

    def _lift(self, key: str) -> None:
        waiting = self._shared.waiting
        if key not in waiting:
            least = min(map(self._work_of, waiting)) if waiting else self._work_of(self._shared.served_last)
            self._work[key] = max(self._work_of(key), least)

    def appendleft(self, entry: Entry) -> None:
        """Put back, before others of its lane, what it was charged for given back."""
        if self._charged:
            self._uncharge(entry)
        self._lanes.setdefault(_lane_of(entry), deque()).appendleft(entry)
        self._size += 1

    def popleft(self) -> Entry:
        name = self._next_lane()
        lane = self._lanes[name]
        entry = lane.popleft()
        if not lane:
            del self._lanes[name]
        self._size -= 1
        return entry

    def replace(self, entries: Iterable[Entry]) -> None:
        """Keep only these, in their order."""
        self._lanes = {}
        self._size = 0
        for entry in entries:
            self._lanes.setdefault(_lane_of(entry), deque()).append(entry)
            self._size += 1

    def sizes(self) -> Mapping[str, int]:
        """Count the entries of each key that has any."""
        found: Counter[str] = Counter()
        for (_, key), lane in self._lanes.items():
            found[key] += len(lane)
        return found

    def charge(self, entry: Entry) -> None:
        """Charge a prompt that is taken, so that the next entry may be another key's."""
        charged = _Charged(entry, entry.num_to_compute, len(entry.generated_ids))
        self._charged[entry.request_id] = charged
        self._add(entry, charged.num_prompt)
        self._shared.served_last = entry.request.key

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

    def _turn(self, lane: _Lane) -> tuple[int, float, int]:
        priority, key = lane
        return priority, self._work_of(key), self._lanes[lane][0].request_id

    def _next_lane(self) -> _Lane:
        lanes = self._lanes
        if len(lanes) == 1:
            return next(iter(lanes))
        # Written out: a server with many keys looks at every one that waits, for each request.
        work, urgent = self._work, min(lanes)[0]
        found, least, oldest = (urgent, ""), math.inf, 0
        for name, lane in lanes.items():
            if name[0] != urgent:
                continue
            done = work.get(name[1], 0.0)
            if done < least or (done == least and lane[0].request_id < oldest):
                found, least, oldest = name, done, lane[0].request_id
        return found


def _lane_of(entry: Entry) -> _Lane:
    return entry.request.priority, entry.request.key
