"""Heads on the newest token's hidden state, without keys."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from typing import Protocol

import torch
from torch import Tensor

from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.models.decoder.loader import Loader
from model_server.runner.runner import Kept, ModelInputs
from model_server.speculation.costs import finish
from model_server.speculation.drafters.drafter import ComputedRow, DraftRow
from model_server.speculation.pace import Pace

# Rows for which the heads are measured, and how often each.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_REPEATS = 3


class Guesser(Protocol):
    """Heads of one kind."""

    def guess(self, hidden: Tensor, newest: Tensor, forced: Rows[list[int]], most: int) -> Tensor:
        """Return likeliest tokens [n, most] int64 behind `newest` [n], drawn from `hidden` [n, hidden],
        `forced` first.
        """


class Heads:
    """A `Drafter`; `Sequence.drafts_from` is a hidden state."""

    position_rows: int | None = None

    def __init__(self, guesser: Guesser, number: int, width: int, loader: Loader) -> None:
        """Take a guesser of at most `number` tokens."""
        self.kv_shapes: tuple[KvShape, ...] = ()
        self.weight_bytes = loader.weight_bytes
        self.pace: Pace | None = None
        self.guesser, self._number, self._width = guesser, number, width
        self._dtype, self._device = loader.reader.dtype, loader.device

    def set_longest(self, longest: int) -> None:
        """They know no positions."""

    def reserve_positions(self, max_positions: int) -> None:
        """They know no positions."""

    def use(self, cache: KvCache | None) -> None:
        """They keep nothing in it."""

    def follow(self, inputs: ModelInputs) -> None:
        """They compute nothing of prompts."""

    def retains(self) -> Kept | None:
        return Kept()

    def on_step(self, rows: Rows[ComputedRow], kept: Kept) -> None:
        assert kept.final is not None
        for row in rows:
            if row.logit_row is not None:
                row.sequence.drafts_from = kept.final[row.logit_row]

    def can_draft(self, sequence: Sequence) -> bool:
        return sequence.drafts_from is not None

    def draft(self, rows: Rows[DraftRow]) -> list[list[int]]:
        hidden = torch.stack([row.sequence.drafts_from for row in rows])
        most = max(len(row.forced) + row.most for row in rows)
        newest = torch.tensor([row.sequence.ids[-1] for row in rows], device=hidden.device)
        guessed = self.guesser.guess(hidden, newest, [row.forced for row in rows], most)
        pairs = zip(rows, guessed.tolist(), strict=True)
        return [ids[len(row.forced) : len(row.forced) + row.most] for row, ids in pairs]

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        costs = []
        for size in _SIZES:
            hidden = torch.zeros(size, self._width, dtype=self._dtype, device=self._device)
            newest = torch.zeros(size, dtype=torch.int64, device=self._device)
            shortest = float("inf")
            for _ in range(_REPEATS):
                begun = time.perf_counter()
                self.guesser.guess(hidden, newest, (), self._number)
                finish(self._device)
                shortest = min(shortest, time.perf_counter() - begun)
            # The slowest rank's, of one place of a draft.
            costs.append((size, -world.all_reduce_min(-round(shortest * 1e9)) / 1e9 / self._number))
        self.pace = Pace(costs)
