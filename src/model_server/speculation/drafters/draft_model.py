"""A small model that drafts, with keys in the same blocks as the model's.

It follows prompts, so shared prefixes, growth and preemption serve both, and computes missing tokens when it drafts.
Blocks filled without it make guesses worse, never tokens wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import upload
from model_server.runner.runner import Kept, ModelInputs, Runner
from model_server.speculation.costs import step_costs
from model_server.speculation.drafters.drafter import ComputedRow, DraftRow
from model_server.speculation.drafters.spans import Span, counted_places, span_inputs
from model_server.speculation.pace import Pace

# The most tokens that one forward computes where a request's keys are behind by many.
_MOST_TOKENS = 512


class DraftModel:
    """A `Drafter` of likeliest tokens, one forward a place."""

    def __init__(self, runner: Runner, base: Runner) -> None:
        """base: the model that it drafts for."""
        self.runner = runner
        self.pace: Pace | None = None
        self.kv_shapes = runner.kv_shapes
        self.position_rows = runner.traits.position_rows
        self.weight_bytes = runner.traits.weight_bytes or 0
        self._vocab_size = min(runner.vocab_size, base.vocab_size)
        self._cache: KvCache | None = None

    def set_longest(self, longest: int) -> None:
        self.runner.set_longest(longest)

    def reserve_positions(self, max_positions: int) -> None:
        self.runner.reserve_positions(max_positions)

    def use(self, cache: KvCache | None) -> None:
        self._cache = cache

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        self.pace = Pace(step_costs(self.runner, cache, world))

    def retains(self) -> Kept | None:
        return None

    def on_step(self, rows: Rows[ComputedRow], kept: Kept) -> None: ...

    def can_draft(self, sequence: Sequence) -> bool:
        return True

    def follow(self, inputs: ModelInputs) -> None:
        """Compute keys of a step with prompts; image tokens count as text."""
        assert self._cache is not None
        attention = inputs.attention
        if attention.last_keys is not None:
            attention = dataclasses.replace(attention, last_keys=None, first_keys=None)
        first = torch.zeros(1, dtype=torch.int64, device=inputs.input_ids.device)
        own = dataclasses.replace(
            inputs,
            input_ids=self._embedded(inputs.input_ids),
            positions=upload(torch.from_numpy(counted_places(attention)), attention.slots.device),
            attention=attention,
            logit_rows=first,
            attention_step=None,
            adapters=None,
            kept=None,
            embeddings=(),  # of images, as wide as the model is
            deep_embeddings=(),
        )
        self.runner.forward(own, self._cache)

    def draft(self, rows: Rows[DraftRow]) -> list[list[int]]:
        """Return likeliest tokens behind each row's and `forced`, writing keys of each except the last."""
        assert self._cache is not None, "prompts come before drafts"
        spans = [(row.known, len(row.ids)) for row in rows]
        for index, (first, stop) in enumerate(spans):
            while stop - first > _MOST_TOKENS:
                self._forward([Span(rows[index].sequence, first, rows[index].ids[first : first + _MOST_TOKENS])])
                first += _MOST_TOKENS
            spans[index] = (first, stop)
        newest = self._forward(
            [Span(row.sequence, first, row.ids[first:]) for row, (first, _) in zip(rows, spans, strict=True)]
        )
        drafts = [[token] for token in newest]
        for place in range(1, max(row.most for row in rows)):
            going = [index for index, row in enumerate(rows) if row.most > place]
            steps = [Span(rows[index].sequence, spans[index][1] + place - 1, drafts[index][-1:]) for index in going]
            for index, token in zip(going, self._forward(steps), strict=True):
                drafts[index].append(token)
        return drafts

    def _forward(self, spans: Rows[Span]) -> list[int]:
        """Compute spans; return the likeliest token behind each."""
        assert self._cache is not None
        step = span_inputs(spans, self._cache.rows[0].device)
        rows = None if len(step.ids) == len(spans) else step.last
        found: list[int] = self.likeliest(step.ids, step.positions, step.attention, rows).tolist()
        return found

    def likeliest(
        self, ids: Tensor, positions: Tensor, attention: AttentionMetadata, rows: Tensor | None = None
    ) -> Tensor:
        """Compute tokens; return the likeliest behind each, or behind `rows`, [n] int64."""
        assert self._cache is not None
        logits = self.runner.forward(ModelInputs(self._embedded(ids), positions, attention, rows), self._cache)
        return logits[:, : self._vocab_size].argmax(dim=-1)

    def _embedded(self, ids: Tensor) -> Tensor:
        """Bound ids to those with an embedding; no text has others."""
        return ids.clamp(max=self.runner.vocab_size - 1)
