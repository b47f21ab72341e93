"""Which adapter is in which slot of the device."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection

from torch import Tensor


class SlotTable:
    """Maps adapter numbers to slots; only `forget` may be called outside the device thread."""

    def __init__(self, num_slots: int, copy: Callable[[int, int], bool]) -> None:
        """Take the number of slots, and `copy`, which fills one in the device's order and returns whether its rows need
        the host.
        """
        self.num_slots = num_slots
        self.num_loads = 0
        self._copy = copy
        self._free = list(reversed(range(num_slots)))
        self._numbers: OrderedDict[int, int] = OrderedDict()  # by slot, the one used longest ago first
        self._slots: dict[int, int] = {}  # by number
        self._need_host: set[int] = set()
        self._gone: deque[int] = deque()  # numbers of adapters whose slots are yet to be freed

    @property
    def num_held(self) -> int:
        """Slots with an adapter. On any thread."""
        return len(set(self._slots).difference(tuple(self._gone)))

    def acquire(self, number: int, in_use: Callable[[], Collection[int]]) -> int | None:
        """Return the adapter's slot, filled if need be: a free one, or the least recent outside `in_use`, if any."""
        while self._gone:
            left = self._slots.pop(self._gone.popleft(), None)
            if left is not None:
                del self._numbers[left]
                self._free.append(left)
        slot = self._slots.get(number)
        if slot is None:
            slot = self._room(in_use)
            if slot is None:
                return None
            self._need_host.discard(slot)
            try:
                needs_host = self._copy(slot, number)
            except BaseException:
                self._free.append(slot)
                raise
            if needs_host:
                self._need_host.add(slot)
            self.num_loads += 1
            self._slots[number], self._numbers[slot] = slot, number
        self._numbers.move_to_end(slot)
        return slot

    def forget(self, number: int) -> None:
        """Drop an adapter that no row has; on any thread."""
        self._gone.append(number)

    def is_capturable(self, slots: Tensor) -> bool:
        """Whether a step with these slots [n], int64 on the host, needs nothing of the host."""
        return not self._need_host or not self._need_host.intersection(slots.tolist())

    def _room(self, in_use: Callable[[], Collection[int]]) -> int | None:
        if self._free:
            return self._free.pop()
        used = in_use()
        slot = next((slot for slot in self._numbers if slot not in used), None)
        if slot is not None:
            del self._slots[self._numbers.pop(slot)]
        return slot
