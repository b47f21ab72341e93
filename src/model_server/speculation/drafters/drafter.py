"""The one interface of every drafter that computes, and the model as the engine runs it with one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_server.batch.inputs import StepInputs
from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept, ModelInputs, Runner, RunnerTraits
from model_server.speculation.pace import Pace


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What to draft for one request. known: tokens whose keys a draft model has; forced: the first tokens of the
    draft; most: how many may follow them, at least 1."""

    sequence: Sequence
    known: int
    forced: list[int]
    most: int

    @property
    def ids(self) -> list[int]:
        return [*self.sequence.ids, *self.forced]


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """What a step computed of one request and has not to be computed again.

    position: of the first of `count` tokens, which are rows `first` and on of the step's tokens. logit_row: of the
    logits from which the request's newest token was drawn; None: the step drew none.
    """

    sequence: Sequence
    position: int
    first: int
    count: int
    logit_row: int | None


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step that was submitted. kept: what it kept of its hidden states. newest: [n] int64 on the device,
    the last token of each row that drew one, in order; None: none did."""

    inputs: ModelInputs
    kept: Kept | None
    newest: Tensor | None
    staging: Staging


class Drafter(Protocol):
    """Guesses the next tokens. Belongs to the device thread; all ranks guess the same.

    kv_shapes: of its own layers, whose keys are in the same blocks as the model's. position_rows, weight_bytes: as in
    `RunnerTraits`. pace: what one place of a draft costs by the number of rows, measured at the warm-up; nothing is
    drafted before.
    """

    kv_shapes: tuple[KvShape, ...]
    position_rows: int | None
    weight_bytes: int
    pace: Pace | None

    def set_longest(self, longest: int) -> None:
        """As in `Runner`."""

    def reserve_positions(self, max_positions: int) -> None:
        """As in `Runner`."""

    def use(self, cache: KvCache | None) -> None:
        """This cache of its layers holds its keys from now on; None: there is none."""

    def measure(self, cache: KvCache, world: ProcessGroup) -> None:
        """Set `pace`. What `cache`, of its layers, holds is overwritten."""

    def keeps(self) -> Kept | None:
        """What a step of the model has to keep for it; None: nothing."""

    def follow(self, inputs: ModelInputs) -> None:
        """A step with prompts was computed by the model."""

    def saw(self, rows: Rows[ComputedRow], kept: Kept) -> None:
        """A step was computed, and `kept` filled."""

    def can_draft(self, sequence: Sequence) -> bool:
        """Whether it knows enough of the request."""

    def draft(self, rows: Rows[DraftRow]) -> list[list[int]]:
        """The likeliest tokens behind each row's own and `forced`; the rows have slots for all of them."""


def decoded_rows(rows: Rows[Sequence]) -> list[ComputedRow]:
    """Of a step in which every row has one token."""
    return [ComputedRow(one, one.cache_length, row, 1, row) for row, one in enumerate(rows)]


def ragged_rows(rows: Rows[Sequence], inputs: StepInputs) -> list[ComputedRow]:
    """Of a step with prompts."""
    sampled = iter(range(len(rows)) if inputs.sampled_host is None else inputs.sampled_host.tolist())
    found, first = [], 0
    for one, count in zip(rows, inputs.model.attention.query_lengths_host, strict=True):
        found.append(ComputedRow(one, one.cache_length, first, count, next(sampled) if one.samples else None))
        first += count
    return found


class DraftedRunner:
    """A model with its drafter, a `runner.Runner`: their layers share one cache, the drafter's behind."""

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

    def keeps(self) -> Kept | None:
        """As its drafter's."""
        return self._drafter.keeps()

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
        """The cache of the last forward is gone: refer to none of its memory."""
        self._whole = self._cache = None
        self._drafter.use(None)

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """The model's logits. Where there are prompts the drafter follows them."""
        if self._whole is not cache or self._cache is None:
            self._whole, self._cache = cache, cache.layers(0, len(self._base.kv_shapes))
            self._drafter.use(self.drafters_part(cache))
        logits = self._base.forward(inputs, self._cache)
        # Chunks of prompts may have a single token each, as rows that decode have; of those all logits are wanted.
        if inputs.logit_rows is not None:
            self._drafter.follow(inputs)
        return logits
