"""Texts of the next step: requests in turn, within its token budget."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from router.pooling.texts import Tokens
from router.shards.pooling import Kind, Numbers

Outcome = Literal["waiting", "running", "done"]


@dataclass(slots=True, eq=False)
class Entry:
    """A request's texts, with an answer each."""

    tokens: Sequence[Tokens]
    kind: Kind
    dimensions: int
    normalize: bool
    done: asyncio.Future[None]
    queued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # of its first text
    waiting: deque[int] = field(default_factory=deque)  # places of the texts that no step has yet
    num_running: int = 0
    answers: dict[int, Numbers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting.extend(range(len(self.tokens)))

    @property
    def num_waiting_tokens(self) -> int:
        return sum(len(self.tokens[place].ids) for place in self.waiting)


@dataclass(frozen=True, slots=True)
class Unit:
    """One text of a request."""

    entry: Entry
    place: int

    @property
    def tokens(self) -> Tokens:
        return self.entry.tokens[self.place]


class TextQueue:
    """Waiting requests, on the event loop."""

    def __init__(self, budget: int, max_size: int | None = None) -> None:
        """Bound a step's tokens (one longer text may exceed it) and texts."""
        self._budget = budget
        self._max_size = max_size
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # by id(), the next one to be served first
        self.num_tokens = 0
        self.num_texts = 0

    def add(self, entry: Entry) -> None:
        self._entries[id(entry)] = entry
        self.num_tokens += entry.num_waiting_tokens
        self.num_texts += len(entry.waiting)

    def remove(self, entry: Entry) -> None:
        """Its texts that wait are not computed."""
        if self._entries.pop(id(entry), None) is not None:
            self.num_tokens -= entry.num_waiting_tokens
            self.num_texts -= len(entry.waiting)
            entry.waiting.clear()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def next_step(self) -> list[Unit]:
        """Return texts in turn until the budget is spent, at least one; none overtakes."""
        units: list[Unit] = []
        tokens = 0
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            place = entry.waiting[0]
            length = len(entry.tokens[place].ids)
            is_full = self._max_size is not None and len(units) >= self._max_size
            if units and (is_full or tokens + length > self._budget):
                break
            entry.waiting.popleft()
            entry.num_running += 1
            tokens += length
            units.append(Unit(entry, place))
            if entry.waiting:
                self._entries.move_to_end(key)
            else:
                del self._entries[key]
        self.num_tokens -= tokens
        self.num_texts -= len(units)
        return units
