"""A small model that drafts, with keys in the same blocks as the model's."""

# It follows prompts, so shared prefixes, growth and preemption serve both, and computes missing tokens when it drafts.
# Blocks filled without it make guesses worse, never tokens wrong.

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.engine.steps.watcher import ComputedRow, ComputedStep
from model_server.features.drafts.costs import step_costs
from model_server.features.drafts.drafters.drafts import Brought, RowDrafts, forced_or, no_drafts
from model_server.features.drafts.drafters.queries import RowsAt, counted_places, single_queries
from model_server.features.drafts.pace import Pace
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging, upload
from model_server.runner.runner import Kept, ModelInputs, Runner

# Tokens of all rows that one forward computes where keys are behind by many.
_MOST_TOKENS = 2048


class DraftModel:
    """A `Drafter` of likeliest tokens, one forward a place.

    `Sequence.drafts_from` counts tokens before the newest that may lack keys.
    """

    is_lost_in_plain_steps = False

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

    def seconds(self, num_rows: int, length: int) -> float:
        assert self.pace is not None
        return 0.0 if not length else self.pace.cost(2 * num_rows) + (length - 1) * self.pace.cost(num_rows)

    def retains(self) -> Kept | None:
        return None

    def on_step(self, rows: Rows[ComputedRow], step: ComputedStep) -> None:
        """Count tokens that may lack keys; prompts are computed in `follow`."""
        for row in rows:
            one = row.sequence
            is_new = one.is_prefilling or one.drafts_from is None
            one.drafts_from = 0 if is_new else max(0, one.drafts_from + row.count)

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

    def start(self, staging: Staging) -> RowDrafts:
        return ModelDrafts(self)

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


class ModelDrafts:
    """A `RowDrafts`; keys may be computed again where other rows lack theirs."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._behind = 1  # the most that any row is; below 0: so many drafted tokens have keys
        self._length = 0  # of the draft that is checked

    def set_rows(self, rows: list[Sequence]) -> None:
        self._behind = max((row.drafts_from for row in rows if row.drafts_from is not None), default=1)

    def select(self, kept: Tensor) -> None:
        """All rows are behind alike."""

    def stop(self, places: Mapping[Sequence, int]) -> None:
        for sequence in places:
            sequence.drafts_from = self._behind

    def draft(self, rows: RowsAt, length: int, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._length = length
        if not length:
            return no_drafts(rows.count, rows.start.device)
        found = [forced_or(self._newest(rows), forced, 0)]
        for place in range(1, length):
            at = (rows.start + place)[:, None]
            stored, attention = single_queries(rows, at, at < rows.limit[:, None], place)
            found.append(forced_or(self._model.likeliest(found[-1], stored.view(-1), attention), forced, place))
        self._behind = -length
        return torch.stack(found, 1), torch.full_like(rows.start, length)

    def apply(self, brought: Brought) -> None:
        """Note that a draft's last token, before the newest if all were right, has no keys."""
        self._behind = 1 if self._length else self._behind + 1

    def _newest(self, rows: RowsAt) -> Tensor:
        """Compute what lacks keys; return the likeliest next token, [num_rows] int64."""
        device, first = rows.start.device, -self._behind
        part = max(1, _MOST_TOKENS // rows.count)
        while True:
            stop = min(1, first + part)
            at = rows.start[:, None] + torch.arange(first, stop, device=device)
            inside = (at >= 0) & (at < rows.limit[:, None])
            ids = rows.history.gather(1, at.clamp(min=0)).long()
            stored, attention = single_queries(rows, at, inside, first)
            last = None
            if stop - first > 2:
                last = torch.arange(1, rows.count + 1, device=device) * (stop - first) - 1
            found = self._model.likeliest(ids.view(-1), stored.view(-1), attention, last)
            if stop == 1:
                return found if last is not None else found.view(rows.count, -1)[:, -1]
            first = stop
