"""Drafts by a layer on the model's hidden states at i and the embedding of token i + 1: EAGLE-3 and MTP."""

# It follows the model's positions with its states, right behind each step, and drafts with its own output. Draft keys,
# in the model's blocks, are computed again from true states by the step that checks them.

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend
from model_server.attention.metadata import AttentionMetadata
from model_server.distributed.group import ProcessGroup
from model_server.engine.steps.watcher import ComputedRow, ComputedStep
from model_server.features.drafts.costs import step_costs
from model_server.features.drafts.drafters.drafts import Brought, RowDrafts, State, forced_or, last_of, no_drafts
from model_server.features.drafts.drafters.queries import RowsAt, counted_places, single_queries
from model_server.features.drafts.drafters.states import RowStates
from model_server.features.drafts.pace import Pace
from model_server.layers.rotary import Rotary
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.memory.transfer import Staging
from model_server.models.decoder.parts import Step
from model_server.runner.runner import Kept, ModelInputs


def begin_step(inputs: ModelInputs, rotaries: Rows[Rotary], backend: AttentionBackend, cache: KvCache) -> Step:
    """What the layer shares in one forward."""
    metadata = inputs.attention
    return Step(
        positions=inputs.positions,
        rotations=tuple(rotary.rotations(inputs.positions, metadata.max_kv_length) for rotary in rotaries),
        slots=metadata.slots,
        cache=cache,
        attention=backend.start(metadata, cache),
        is_decode=metadata.is_decode,
    )


class DraftLayer(Protocol):
    """A layer and what is around it; `max_positions` None: unbounded."""

    @property
    def kv_shape(self) -> KvShape: ...

    @property
    def rotaries(self) -> tuple[Rotary, ...]: ...

    @property
    def max_positions(self) -> int | None: ...

    def retains(self) -> Kept: ...

    def kept(self, kept: Kept) -> Tensor:
        """Return what it needs of what a step kept, [num_tokens, width]."""

    def states(self, kept: Tensor) -> Tensor:
        """Turn that [n, width] into what it reads [n, hidden]."""

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Compute [n, hidden] from following tokens and `hidden` [n, hidden], None: zeros."""

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Return the model's ids [n] int64 for [n, hidden] of `forward`."""

    def next_states(self, hidden: Tensor) -> Tensor:
        """Return what the next place reads instead of the model's states."""


class LayerDrafter:
    """A `Drafter`; `Sequence.drafts_from` is what the layer last gave."""

    is_lost_in_plain_steps = True
    position_rows: int | None = None

    def __init__(self, layer: DraftLayer, weight_bytes: int) -> None:
        self.kv_shapes: tuple[KvShape, ...] = (layer.kv_shape,)
        self.weight_bytes = weight_bytes
        self.pace: Pace | None = None
        self._layer = layer
        self._cache: KvCache | None = None

    def set_longest(self, longest: int) -> None:
        for rotary in self._layer.rotaries:
            rotary.set_longest(longest)

    def reserve_positions(self, max_positions: int) -> None:
        for rotary in self._layer.rotaries:
            rotary.reserve(max_positions)

    def use(self, cache: KvCache | None) -> None:
        self._cache = cache

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        self.pace = Pace(step_costs(_Place(self._layer), cache, world))

    def seconds(self, num_rows: int, length: int) -> float:
        assert self.pace is not None
        return self.pace.cost(num_rows * (length + 1)) + max(0, length - 1) * self.pace.cost(num_rows)

    def retains(self) -> Kept | None:
        return self._layer.retains()

    def follow(self, inputs: ModelInputs) -> None:
        """`on_step` does, where the hidden states are."""

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
        given = self.compute(ids, positions, attention, step.kept).index_select(0, last)
        for number, row in enumerate(rows):
            one = row.sequence
            if row.logit_row is not None and (one.drafts_from is not None or one.is_prefilling):
                one.drafts_from = State(given, number)

    def start(self, staging: Staging) -> RowDrafts:
        return LayerDrafts(self, staging)

    def compute(self, ids: Tensor, positions: Tensor, attention: AttentionMetadata, kept: Kept) -> Tensor:
        """Compute a step's positions, followed by `ids`; return [n, hidden]."""
        return self._computed(ids, positions, attention, self._layer.states(self._layer.kept(kept)))

    def go_on(self, ids: Tensor, positions: Tensor, attention: AttentionMetadata, given: Tensor) -> Tensor:
        """Compute drafts' next position behind `given` [n, hidden]."""
        return self._computed(ids, positions, attention, self._layer.next_states(given))

    def likeliest(self, given: Tensor) -> Tensor:
        return self._layer.likeliest(given)

    def _computed(self, ids: Tensor, positions: Tensor, attention: AttentionMetadata, states: Tensor) -> Tensor:
        assert self._cache is not None, "prompts come before drafts"
        return self._layer.forward(ModelInputs(ids, positions, attention, None, hidden=states), self._cache)


class LayerDrafts(RowStates):
    """A `RowDrafts`."""

    def __init__(self, drafter: LayerDrafter, staging: Staging) -> None:
        super().__init__(staging)
        self._drafter = drafter

    def draft(self, rows: RowsAt, length: int, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self._states is None or not length:
            return no_drafts(rows.count, rows.start.device)
        hidden, known = self._states
        found = [forced_or(self._drafter.likeliest(hidden), forced, 0)]
        for place in range(length - 1):
            at = (rows.start + place)[:, None]
            stored, attention = single_queries(rows, at, at < rows.limit[:, None], place)
            hidden = self._drafter.go_on(found[-1], stored.view(-1), attention, hidden)
            found.append(forced_or(self._drafter.likeliest(hidden), forced, place + 1))
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


@dataclass(frozen=True, slots=True)
class _Place:
    """One place of a draft, to be measured."""

    layer: DraftLayer

    @property
    def max_positions(self) -> int | None:
        return self.layer.max_positions

    def forward(self, inputs: ModelInputs, cache: KvCache) -> object:
        return self.layer.likeliest(self.layer.forward(inputs, cache))
