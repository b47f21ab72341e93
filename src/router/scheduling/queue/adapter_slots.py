"""Who may join within the shards' slots for LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto

from router.scheduling.entry import Entry


class Verdict(Enum):
    """JOINS: there is a slot, or none needed. WAITS: others may pass. BLOCKS: none behind joins."""

    JOINS = auto()
    WAITS = auto()
    BLOCKS = auto()


class AdapterSlots:
    """Bounds different adapters in all batches to `num_slots`.

    Requests with running adapters pass the first that waits, for `patience` steps.
    """

    def __init__(self, num_slots: int, patience: int) -> None:
        self._num_slots = num_slots
        self._patience = patience
        self._in_use: set[str] = set()
        self._num_steps = 0
        self._first: Entry | None = None  # of those that wait, and the number of steps when it became that
        self._first_since = 0
        self._has_passed_first = False

    def start(self, running: Iterable[Entry], num_steps: int) -> None:
        """Begin a look at the queue, after `num_steps` answers."""
        self._in_use = {entry.request.namespace for entry in running if entry.request.namespace}
        self._num_steps = num_steps
        self._has_passed_first = False

    def verdict(self, entry: Entry) -> Verdict:
        """Judge the next entry; one that does not fit ends the look."""
        if self._takes(entry, self._in_use):
            return Verdict.JOINS
        if self._has_passed_first:
            return Verdict.WAITS
        self._has_passed_first = True
        if self._first is not entry:
            self._first, self._first_since = entry, self._num_steps
        return Verdict.BLOCKS if self._is_impatient else Verdict.WAITS

    def joinable(self, waiting: Iterable[Entry], most_passed: int) -> Iterator[Entry]:
        """Yield who would join with room for all, passing at most `most_passed`."""
        in_use = set(self._in_use)
        for entry in waiting:
            if self._takes(entry, in_use):
                yield entry
                continue
            most_passed -= 1
            if not most_passed or (entry is self._first and self._is_impatient):
                return

    def _takes(self, entry: Entry, in_use: set[str]) -> bool:
        """Whether it has a slot beside `in_use`, which it then joins."""
        adapter = entry.request.namespace
        if not adapter or adapter in in_use:
            return True
        if len(in_use) >= self._num_slots:
            return False
        in_use.add(adapter)
        return True

    @property
    def _is_impatient(self) -> bool:
        return self._num_steps - self._first_since >= self._patience
