"""EAGLE-3 and MTP: a layer behind the model, on its hidden states and drawn tokens, or its own output.

The step that checks a draft computes its keys again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept
from model_server.speculation.device.drafters.states import RowStates
from model_server.speculation.device.drafts import Brought, RowDrafts, State, last_of, no_drafts
from model_server.speculation.device.queries import RowsAt, single_queries
from model_server.speculation.drafters.drafter import ComputedRow, ComputedStep
from model_server.speculation.drafters.layer_drafter import LayerDrafter
from model_server.speculation.drafters.spans import counted_places


class DeviceLayer:
    """A `DeviceDrafter`; `Sequence.drafts_from` is what the layer last gave."""

    is_lost_in_plain_steps = True

    def __init__(self, drafter: LayerDrafter) -> None:
        self._drafter = drafter

    @property
    def is_measured(self) -> bool:
        return self._drafter.pace is not None

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        self._drafter.measure(cache, world)

    def seconds(self, num_rows: int, length: int) -> float:
        pace = self._drafter.pace
        assert pace is not None
        return pace.cost(num_rows * (length + 1)) + max(0, length - 1) * pace.cost(num_rows)

    def retains(self) -> Kept | None:
        return self._drafter.retains()

    def on_step(self, rows: Rows[ComputedRow], step: ComputedStep) -> None:
        """Compute the step's positions, followed by the prompt's or drawn tokens."""
        assert step.kept is not None
        places = [row.first + row.count - 1 for row in rows]
        drew = [number for number, row in enumerate(rows) if row.logit_row is not None]
        known = [_following(row) for row in rows]
        arrays = np.array(places, np.int64), np.array(known, np.int64), np.array(drew, np.int64)
        last, following, drawn = step.staging.upload(*arrays)
        if step.newest is not None and drew:
            following = following.index_copy(0, drawn, step.newest)
        ids = step.inputs.input_ids.roll(-1).index_copy(0, last, following)
        attention = step.inputs.attention
        if attention.last_keys is not None:
            attention = dataclasses.replace(attention, last_keys=None, first_keys=None)
        (positions,) = step.staging.upload(counted_places(attention))
        given = self._drafter.compute(ids, positions, attention, step.kept).index_select(0, last)
        for number, row in enumerate(rows):
            one = row.sequence
            if row.logit_row is not None and (one.drafts_from is not None or one.is_prefilling):
                one.drafts_from = State(given, number)

    def can_draft(self, sequence: Sequence) -> bool:
        return sequence.drafts_from is not None

    def start(self, staging: Staging) -> RowDrafts:
        return LayerDrafts(self._drafter, staging)


class LayerDrafts(RowStates):
    """A `RowDrafts`."""

    def __init__(self, drafter: LayerDrafter, staging: Staging) -> None:
        super().__init__(staging)
        self._drafter = drafter

    def draft(self, rows: RowsAt, length: int) -> tuple[Tensor, Tensor]:
        if self._states is None or not length:
            return no_drafts(rows.count, rows.start.device)
        hidden, known = self._states
        found = [self._drafter.likeliest(hidden)]
        for place in range(length - 1):
            at = (rows.start + place)[:, None]
            stored, attention = single_queries(rows, at, at < rows.limit[:, None], place)
            hidden = self._drafter.go_on(found[-1], stored.view(-1), attention, hidden)
            found.append(self._drafter.likeliest(hidden))
        return torch.stack(found, 1), known.long() * length

    def apply(self, brought: Brought) -> None:
        if self._states is None:
            return
        assert brought.kept is not None
        hidden, known = self._states
        shape = brought.drawn.shape
        given = self._drafter.compute(
            brought.drawn.reshape(-1), brought.stored.reshape(-1), brought.attention, brought.kept
        )
        self._states = last_of(given.view(*shape, -1), brought.got, hidden), known


def _following(row: ComputedRow) -> int:
    """Return the prompt's next token; 0 if drawn."""
    end = row.position + row.count
    return row.sequence.ids[end] if row.logit_row is None else 0
