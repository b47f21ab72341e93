"""The interface of computing drafters, and the model with one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows
from typing import Protocol

from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.engine.steps.watcher import ComputedRow, ComputedStep
from model_server.features.drafts.drafters.drafts import RowDrafts
from model_server.features.drafts.pace import Pace
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept, ModelInputs, Runner, RunnerTraits


class Drafter(Protocol):
    """Guesses the next tokens of sequences with `drafts_from`, alike on all ranks, on the device thread."""

    # Of its layers, in the model's blocks.
    kv_shapes: tuple[KvShape, ...]
    position_rows: int | None
    weight_bytes: int
    # Cost of a place by rows; before it is measured nothing is drafted.
    pace: Pace | None
    # It must see all steps of its rows.
    is_lost_in_plain_steps: bool

    def set_longest(self, longest: int) -> None: ...

    def reserve_positions(self, max_positions: int) -> None: ...

    def use(self, cache: KvCache | None) -> None:
        """Set the cache of its layers, if any."""

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        """Set `pace`; overwrites `cache`."""

    def seconds(self, num_rows: int, length: int) -> float:
        """Return the time of drafts, and of seeing the step that checks them."""

    def retains(self) -> Kept | None:
        """Return what a step must keep for it, if anything."""

    def follow(self, inputs: ModelInputs) -> None:
        """Note a step with prompts."""

    def on_step(self, rows: Rows[ComputedRow], step: ComputedStep) -> None:
        """Note a submitted step whose drafts, if any, the device did not make."""

    def start(self, staging: Staging) -> RowDrafts:
        """Return the drafts of a batch."""


class DraftedRunner:
    """A model and drafter that share a cache, the drafter's layers behind."""

    def __init__(self, base: Runner, drafter: Drafter) -> None:
        self._base = base
        self._drafter = drafter
        own = base.traits
        rows = [one for one in (own.position_rows, drafter.position_rows) if one is not None]
        self.traits: RunnerTraits = dataclasses.replace(
            own,
            position_rows=min(rows, default=None),
            weight_bytes=None if own.weight_bytes is None else own.weight_bytes + drafter.weight_bytes,
        )
        self._whole: KvCache | None = None
        self._cache: KvCache | None = None

    @property
    def vocab_size(self) -> int:
        return self._base.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self._base.max_positions

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return (*self._base.kv_shapes, *self._drafter.kv_shapes)

    def retains(self) -> Kept | None:
        return self._drafter.retains()

    def set_longest(self, longest: int) -> None:
        self._base.set_longest(longest)
        self._drafter.set_longest(longest)

    def reserve_positions(self, max_positions: int) -> None:
        self._base.reserve_positions(max_positions)
        self._drafter.reserve_positions(max_positions)

    def drafters_part(self, cache: KvCache) -> KvCache:
        """The drafter's layers of a cache."""
        return cache.layers(len(self._base.kv_shapes), len(self._drafter.kv_shapes))

    def forget_cache(self) -> None:
        """Drop references to the last cache."""
        self._whole = self._cache = None
        self._drafter.use(None)

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Return the model's logits; the drafter follows prompts."""
        if self._whole is not cache or self._cache is None:
            self._whole, self._cache = cache, cache.layers(0, len(self._base.kv_shapes))
            self._drafter.use(self.drafters_part(cache))
        logits = self._base.forward(inputs, self._cache)
        # Chunks of prompts may have a single token each, as rows that decode have; of those all logits are wanted.
        if inputs.logit_rows is not None:
            self._drafter.follow(inputs)
        return logits
