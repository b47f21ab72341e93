"""Medusa heads and MLP speculators on the newest token's hidden state."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from torch import Tensor

from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept
from model_server.speculation.device.drafters.states import RowStates
from model_server.speculation.device.drafts import Brought, RowDrafts, State, last_of, no_drafts
from model_server.speculation.device.queries import RowsAt
from model_server.speculation.drafters.drafter import ComputedRow, ComputedStep
from model_server.speculation.drafters.heads import Guesser, Heads


class DeviceHeads:
    """A `DeviceDrafter`; `Sequence.drafts_from` is a row's `State`."""

    is_lost_in_plain_steps = False

    def __init__(self, heads: Heads) -> None:
        self._heads = heads

    @property
    def is_measured(self) -> bool:
        return self._heads.pace is not None

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        self._heads.measure(cache, world)

    def seconds(self, num_rows: int, length: int) -> float:
        assert self._heads.pace is not None
        return length * self._heads.pace.cost(num_rows)

    def retains(self) -> Kept | None:
        return self._heads.retains()

    def on_step(self, rows: Rows[ComputedRow], step: ComputedStep) -> None:
        drawn = [row for row in rows if row.logit_row is not None]
        if not drawn:
            return
        assert step.kept is not None and step.kept.final is not None
        (index,) = step.staging.upload(np.array([row.logit_row for row in drawn], np.int64))
        states = step.kept.final.index_select(0, index)  # a copy: a replay writes where the one before wrote
        for number, row in enumerate(drawn):
            row.sequence.drafts_from = State(states, number)

    def can_draft(self, sequence: Sequence) -> bool:
        return sequence.drafts_from is not None

    def start(self, staging: Staging) -> RowDrafts:
        return HeadDrafts(self._heads.guesser, staging)


class HeadDrafts(RowStates):
    """A `RowDrafts`."""

    def __init__(self, guesser: Guesser, staging: Staging) -> None:
        super().__init__(staging)
        self._guesser = guesser

    def draft(self, rows: RowsAt, length: int) -> tuple[Tensor, Tensor]:
        if self._states is None or not length:
            return no_drafts(rows.count, rows.start.device)
        hidden, known = self._states
        return self._guesser.guess(hidden, rows.newest, (), length), known.long() * length

    def apply(self, brought: Brought) -> None:
        if self._states is None:
            return
        assert brought.kept is not None and brought.kept.final is not None
        hidden, known = self._states
        states = brought.kept.final.view(*brought.drawn.shape, -1)
        self._states = last_of(states, brought.got, hidden), known
