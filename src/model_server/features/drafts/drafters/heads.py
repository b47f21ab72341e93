"""Heads on the newest token's hidden state, without keys."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.engine.steps.watcher import ComputedRow, ComputedStep
from model_server.features.drafts.costs import finish
from model_server.features.drafts.drafters.drafts import Brought, RowDrafts, State, last_of, no_drafts
from model_server.features.drafts.drafters.queries import RowsAt
from model_server.features.drafts.drafters.states import RowStates
from model_server.features.drafts.pace import Pace
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.memory.transfer import Staging
from model_server.models.decoder.loader import Loader
from model_server.runner.runner import Kept, ModelInputs

# Rows for which the heads are measured, and how often each.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_REPEATS = 3


class Guesser(Protocol):
    """Heads of one kind."""

    def guess(self, hidden: Tensor, newest: Tensor, forced: Tensor | None, most: int) -> Tensor:
        """Return likeliest tokens [n, most] int64 behind `newest` [n], drawn from `hidden` [n, hidden].

        Args:
            forced: [n, most] int64, tokens that take a guess's place, or -1.
        """


class Heads:
    """A `Drafter`; `Sequence.drafts_from` is a row's `State`."""

    is_lost_in_plain_steps = False
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

    def on_step(self, rows: Rows[ComputedRow], step: ComputedStep) -> None:
        drawn = [row for row in rows if row.logit_row is not None]
        if not drawn:
            return
        assert step.kept is not None and step.kept.final is not None
        (index,) = step.staging.upload(np.array([row.logit_row for row in drawn], np.int64))
        states = step.kept.final.index_select(0, index)  # a copy: a replay writes where the one before wrote
        for number, row in enumerate(drawn):
            row.sequence.drafts_from = State(states, number)

    def start(self, staging: Staging) -> RowDrafts:
        return HeadDrafts(self.guesser, staging)

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        costs = []
        for size in _SIZES:
            hidden = torch.zeros(size, self._width, dtype=self._dtype, device=self._device)
            newest = torch.zeros(size, dtype=torch.int64, device=self._device)
            shortest = float("inf")
            for _ in range(_REPEATS):
                begun = time.perf_counter()
                self.guesser.guess(hidden, newest, None, self._number)
                finish(self._device)
                shortest = min(shortest, time.perf_counter() - begun)
            # The slowest rank's, of one place of a draft.
            costs.append((size, -world.all_reduce_min(-round(shortest * 1e9)) / 1e9 / self._number))
        self.pace = Pace(costs)

    def seconds(self, num_rows: int, length: int) -> float:
        assert self.pace is not None
        return length * self.pace.cost(num_rows)


class HeadDrafts(RowStates):
    """A `RowDrafts`."""

    def __init__(self, guesser: Guesser, staging: Staging) -> None:
        super().__init__(staging)
        self._guesser = guesser

    def draft(self, rows: RowsAt, length: int, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self._states is None or not length:
            return no_drafts(rows.count, rows.start.device)
        hidden, known = self._states
        return self._guesser.guess(hidden, rows.newest, forced, length), known.long() * length

    def apply(self, brought: Brought) -> None:
        if self._states is None:
            return
        assert brought.kept is not None and brought.kept.final is not None
        hidden, known = self._states
        states = brought.kept.final.view(*brought.drawn.shape, -1)
        self._states = last_of(states, brought.got, hidden), known
