"""Slots for the states that layers keep of requests beside their blocks, by the router's numbers."""

# | slot                                | owner                                                                     |
# |-------------------------------------|---------------------------------------------------------------------------|
# | 0                                   | no request; the health probe and padding rows compute there               |
# | of a running entry                  | the entry's `Allocation`, as its blocks                                   |
# | of a state that its prompt will save | the same, until the prompt is computed; then a `Checkpoint`              |
# | of a `Checkpoint`                   | the trie's node with the last block that the state has seen               |
# | all others                          | free                                                                      |
#
# A checkpoint goes with its last block, or when its slot is needed: requests come before checkpoints.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count

from router.scheduling.cache.radix import Checkpoint, RadixNode

# A prompt that is known for so many tokens more than it can continue from is worth another checkpoint.
_WORTH_TOKENS = 64
# Tokens at a prompt's end that the next turn may not repeat: those that open the answer.
_OPENING_TOKENS = 8


class Kind(IntEnum):
    """Why a checkpoint was saved; the largest goes first."""

    # Where prompts part: what many begin with.
    JUNCTION = 0
    # The end of a chat's last user message: the next turn may not repeat what was thought behind it.
    USER = 1
    # The end of a prompt, where its conversation continues.
    END = 2
    # An end that a longer prompt has continued from and saved its own, or a user message before the last.
    SUPERSEDED = 3


@dataclass(slots=True)
class Save:
    """A copy that a prompt makes on its way, behind `position` tokens."""

    position: int
    slot: int
    kind: Kind


@dataclass(slots=True)
class StatePlace:
    """What an `Allocation` holds of the slots."""

    slot: int
    # Prompt tokens: what is generated behind them is not shared.
    num_prompt: int
    # What its first forward continues from.
    restored: Checkpoint | None = None
    restored_from: int | None = None
    saves: list[Save] = field(default_factory=list)


@dataclass(slots=True)
class StateCounts:
    """What has happened so far."""

    saved: int = 0
    restored: int = 0
    # Prompt tokens whose blocks were known, but computed again from the nearest checkpoint.
    recomputed: int = 0


class StateSlots:
    """Gives slots to requests, and what is left to checkpoints."""

    def __init__(self, num_slots: int, grid: int) -> None:
        """Number slots from 1 on; states are saved at multiples of `grid` tokens."""
        self.num_slots = num_slots
        self.counts = StateCounts()
        self._grid = grid
        self._untouched = count(1)
        self._free: list[int] = []
        self._num_free = num_slots
        self._checkpoints: set[Checkpoint] = set()
        self._time = count()

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def has_any(self) -> bool:
        """Whether a request can get one."""
        return bool(self._num_free or self._checkpoints)

    def start(self, num_prompt: int, restored: Checkpoint | None = None) -> StatePlace:
        """Give a request its slot, which must be there: that of its checkpoint as the last."""
        if restored is not None:
            self._use(restored)
            self.counts.restored += 1
        slot = self._acquire(restored)
        source = None if restored is None else restored.slot
        if slot is None:
            assert restored is not None, "there is a free slot or a checkpoint"
            self.drop(restored)
            slot, restored = self._pop(), None
        return StatePlace(slot, num_prompt, restored, source)

    def plan_saves(
        self, place: StatePlace, num_computed: int, num_known: int, *, answer_start: int = 0, is_junction: bool = True
    ) -> None:
        """Find where the prompt's state is saved, as far as there are slots.

        Args:
            num_computed: Tokens that it does not compute.
            num_known: Tokens that are known from earlier prompts.
            answer_start: Tokens of a chat in front of all answers to its last user message; 0: unknown.
            is_junction: Earlier prompts continue otherwise behind what is known, instead of ending there.
        """
        self.counts.recomputed += num_known - num_computed
        wanted = {self._before(place.num_prompt): Kind.END, self._before(answer_start): Kind.USER}
        if is_junction and num_known > num_computed + _WORTH_TOKENS:
            wanted.setdefault(num_known // self._grid * self._grid, Kind.JUNCTION)
        # An end will have been restored before anything is saved, and gives its slot rather than what is worth more.
        kept = None if place.restored is None or place.restored.kind >= Kind.END else place.restored
        for position, kind in sorted(wanted.items()):
            if position > num_computed and (slot := self._acquire(kept)) is not None:
                place.saves.append(Save(position, slot, kind))

    def register(self, place: StatePlace, node: RadixNode, depth: int, block_size: int) -> None:
        """Hang what was saved on the trie, whose `node` ends behind `depth` known blocks of the prompt."""
        kept = [save for save in place.saves if save.position <= depth * block_size]
        for save in kept:
            place.saves.remove(save)
            at, offset = node.holder(depth, save.position // block_size)
            one = at.checkpoints.get(offset)
            if one is not None:
                self._use(one)
                one.kind = min(one.kind, save.kind)
                self._give_back(save.slot)
            else:
                one = at.checkpoints[offset] = Checkpoint(save.slot, save.kind, next(self._time), at, offset)
                self._checkpoints.add(one)
                self.counts.saved += 1
            if save.kind == Kind.USER:
                _supersede_users_before(one)
        last = place.restored
        if kept and last is not None and last in self._checkpoints and last.kind == Kind.END:
            last.kind = Kind.SUPERSEDED

    def free(self, place: StatePlace) -> None:
        """Give back a request's slots."""
        self._give_back(place.slot)
        for save in place.saves:
            self._give_back(save.slot)

    def forget(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Give back slots of checkpoints whose nodes have forgotten them."""
        for one in checkpoints:
            self._checkpoints.remove(one)
            self._give_back(one.slot)

    def drop(self, checkpoint: Checkpoint) -> None:
        del checkpoint.node.checkpoints[checkpoint.offset]
        self.forget((checkpoint,))

    def _use(self, checkpoint: Checkpoint) -> None:
        checkpoint.last_use = next(self._time)
        checkpoint.is_proven = True

    def _before(self, position: int) -> int:
        """Return where a state is saved so that prompts which open the answer otherwise may continue from it."""
        return (position - 1 - _OPENING_TOKENS) // self._grid * self._grid

    def _acquire(self, spared: Checkpoint | None) -> int | None:
        """Return a free slot, or a checkpoint's except that of `spared`."""
        if not self._num_free:
            most = sum(map(_is_safe_junction, self._checkpoints)) > self.num_slots // 4

            def order(one: Checkpoint) -> tuple[int, int]:
                kind = Kind.END if one.kind == Kind.JUNCTION and (most or not _is_safe_junction(one)) else one.kind
                return kind, -one.last_use

            worst = max((one for one in self._checkpoints if one is not spared), key=order, default=None)
            if worst is None:
                return None
            self.drop(worst)
        return self._pop()

    def _pop(self) -> int:
        """Return the lowest free number: pages of others stay untouched."""
        self._num_free -= 1
        return heappop(self._free) if self._free else next(self._untouched)

    def _give_back(self, slot: int) -> None:
        self._num_free += 1
        heappush(self._free, slot)


def _is_safe_junction(checkpoint: Checkpoint) -> bool:
    """Whether others have come by: one conversation alone may part from what it has left."""
    return checkpoint.kind == Kind.JUNCTION and checkpoint.is_proven


def _supersede_users_before(checkpoint: Checkpoint) -> None:
    """Leave the last user message of a path its class alone."""
    node: RadixNode | None = checkpoint.node
    while node is not None:
        for one in node.checkpoints.values():
            if one.kind == Kind.USER and one is not checkpoint:
                one.kind = Kind.SUPERSEDED
        node = node.parent
