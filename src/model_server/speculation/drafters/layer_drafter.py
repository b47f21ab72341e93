"""Drafts by a layer on the model's hidden states at i and the embedding of token i + 1.

It follows the model's positions with its states, and drafts with its own output. Draft keys, in the model's blocks, are
computed again from true states.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend
from model_server.attention.metadata import AttentionMetadata
from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.layers.rotary import Rotary
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.models.decoder.parts import Step
from model_server.runner.runner import Kept, ModelInputs
from model_server.speculation.costs import step_costs
from model_server.speculation.drafters.drafter import ComputedRow, DraftRow
from model_server.speculation.drafters.spans import Span, span_inputs
from model_server.speculation.pace import Pace

# Positions of a request that wait to be computed, beyond which they are, even if nothing is drafted.
_MOST_WAITING = 256


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


class _Waiting:
    """Positions from `position` on that the layer has yet to compute."""

    def __init__(self, position: int) -> None:
        self.position = position
        # The model's, [n, width] each, in order.
        self.states: list[Tensor] = []
        self.count = 0

    @property
    def end(self) -> int:
        return self.position + self.count

    def add(self, states: Tensor) -> None:
        self.states.append(states)
        self.count += len(states)

    def pop(self, count: int) -> Tensor:
        """Take the first positions' states."""
        states = torch.cat(self.states)
        self.position += count
        self.count -= count
        self.states = [states[count:].clone()] if self.count else []  # not a view, which keeps all of a prompt's
        return states[:count]


class LayerDrafter:
    """A `Drafter`; `Sequence.drafts_from` is what waits."""

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

    def retains(self) -> Kept | None:
        return self._layer.retains()

    def follow(self, inputs: ModelInputs) -> None:
        """`on_step` does, where the hidden states are."""

    def on_step(self, rows: Rows[ComputedRow], kept: Kept) -> None:
        states = self._layer.kept(kept)
        full = []
        for row in rows:
            waiting = row.sequence.drafts_from
            if waiting is None or waiting.end != row.position:
                waiting = row.sequence.drafts_from = _Waiting(row.position)
            own = states[row.first : row.first + row.count]
            waiting.add(own if len(own) == len(states) else own.clone())  # a view would keep the whole step's
            # Of the last position the next token is known only if it is one of the prompt's.
            known = min(waiting.end, len(row.sequence.ids) - 1) - waiting.position
            if known > 0 and (row.sequence.is_prefilling or waiting.count > _MOST_WAITING):
                full.append((row.sequence, known))
        if full:
            self._compute_waiting(full)

    def can_draft(self, sequence: Sequence) -> bool:
        waiting = sequence.drafts_from
        return waiting is not None and waiting.count > 0 and waiting.end == len(sequence.ids) - 1

    def draft(self, rows: Rows[DraftRow]) -> list[list[int]]:
        """Whatever waits is computed first."""
        hidden = self._compute_waiting([(row.sequence, row.sequence.drafts_from.count) for row in rows])
        places = [len(row.forced) + row.most for row in rows]
        drafts: list[list[int]] = [[] for _ in rows]
        going = list(range(len(rows)))
        for place in range(max(places)):
            for row, token in zip(going, self._layer.likeliest(hidden).tolist(), strict=True):
                forced = rows[row].forced
                drafts[row].append(forced[place] if place < len(forced) else token)
            kept = [index for index, row in enumerate(going) if places[row] > place + 1]
            if not kept:
                break
            if len(kept) < len(going):
                hidden = hidden[kept]
                going = [going[index] for index in kept]
            spans = [
                Span(rows[row].sequence, len(rows[row].sequence.ids) - 1 + place, drafts[row][-1:]) for row in going
            ]
            hidden = self._forward(spans, self._layer.next_states(hidden))
        return [ids[len(row.forced) :] for row, ids in zip(rows, drafts, strict=True)]

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

    def _compute_waiting(self, rows: Rows[tuple[Sequence, int]]) -> Tensor:
        """Compute waiting positions; return the layer's output at each row's last."""
        spans, states = [], []
        for sequence, count in rows:
            waiting: _Waiting = sequence.drafts_from
            first = waiting.position
            spans.append(Span(sequence, first, sequence.ids[first + 1 : first + 1 + count]))
            states.append(waiting.pop(count))
        return self._forward(spans, self._layer.states(torch.cat(states)))

    def _forward(self, spans: Rows[Span], states: Tensor) -> Tensor:
        """Compute spans whose tokens follow their positions; return the last outputs."""
        step = span_inputs(spans, states.device)
        given = self._computed(step.ids, step.positions, step.attention, states)
        return given if len(given) == len(spans) else given[step.last]


@dataclass(frozen=True, slots=True)
class _Place:
    """One place of a draft, to be measured."""

    layer: DraftLayer

    @property
    def max_positions(self) -> int | None:
        return self.layer.max_positions

    def forward(self, inputs: ModelInputs, cache: KvCache) -> object:
        return self.layer.likeliest(self.layer.forward(inputs, cache))
