"""A small model that drafts: its keys and values are in the same blocks as those of the model that it guesses for.

It has computed whatever prompts and chunks the model has, so shared prefixes, growth and preemption serve both. Of the
tokens that were generated it computes those that it lacks when it drafts the next time. Where a shared block was filled
without it, its guesses are worse, and no token is wrong: the model checks each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.batch.sequence import Sequence
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.runner.runner import ModelInputs, Runner, RunnerTraits
from model_server.speculation.pace import Pace

# The most tokens that one forward computes where a request's keys are behind by many.
_MOST_TOKENS = 512


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What to draft for one request. known: tokens whose keys the draft model has; forced: the first tokens of the
    draft; most: how many may follow them, at least 1."""

    sequence: Sequence
    known: int
    forced: list[int]
    most: int

    @property
    def ids(self) -> list[int]:
        return [*self.sequence.ids, *self.forced]


class DraftModel:
    """Drafts the likeliest tokens, one forward for each place. Belongs to the device thread.

    pace: what its own steps cost, measured at the warm-up; none are drafted before.
    """

    def __init__(self, runner: Runner, base: Runner) -> None:
        """base: the model that it drafts for."""
        self.runner = runner
        self.pace: Pace | None = None
        self._first_layer = len(base.kv_shapes)
        self._vocab_size = min(runner.vocab_size, base.vocab_size)
        self._cache: KvCache | None = None

    def cache_of(self, cache: KvCache) -> KvCache:
        """Its layers of a cache that has the model's before them."""
        return cache.layers(self._first_layer, len(self.runner.kv_shapes))

    def use(self, cache: KvCache) -> None:
        """Its layers of this cache hold its keys from now on."""
        self._cache = self.cache_of(cache)

    def follow(self, inputs: ModelInputs) -> None:
        """Compute the keys of a step that has prompts."""
        assert self._cache is not None
        first = torch.zeros(1, dtype=torch.int64, device=inputs.input_ids.device)
        own = dataclasses.replace(
            inputs, input_ids=self._embedded(inputs.input_ids), logit_rows=first, attention_step=None, adapters=None
        )
        self.runner.forward(own, self._cache)

    def draft(self, rows: Rows[DraftRow]) -> list[list[int]]:
        """The likeliest tokens behind each row's own and `forced`; the rows have slots for all of them. Keys are
        written for each token except the last."""
        assert self._cache is not None, "prompts come before drafts"
        spans = [(row.known, len(row.ids)) for row in rows]
        for index, (first, stop) in enumerate(spans):
            while stop - first > _MOST_TOKENS:
                self._forward([(rows[index], rows[index].ids[first : first + _MOST_TOKENS], first)])
                first += _MOST_TOKENS
            spans[index] = (first, stop)
        newest = self._forward([(row, row.ids[first:], first) for row, (first, _) in zip(rows, spans, strict=True)])
        drafts = [[token] for token in newest]
        for place in range(1, max(row.most for row in rows)):
            going = [index for index, row in enumerate(rows) if row.most > place]
            steps = [(rows[index], drafts[index][-1:], spans[index][1] + place - 1) for index in going]
            for index, token in zip(going, self._forward(steps), strict=True):
                drafts[index].append(token)
        return drafts

    def _forward(self, steps: Rows[tuple[DraftRow, list[int], int]]) -> list[int]:
        """Compute tokens of rows from a position on; the likeliest token behind the last one of each."""
        assert self._cache is not None
        device = self._cache.rows[0].device
        counts = np.array([len(ids) for _, ids, _ in steps], np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        kv_lengths = np.array([first + len(ids) for _, ids, first in steps], np.int32)
        arrays: list[npt.NDArray[np.generic]] = [
            np.concatenate([np.asarray(ids, np.int64) for _, ids, _ in steps]),
            np.concatenate([np.arange(first, first + len(ids)) for _, ids, first in steps]),
            np.concatenate([row.sequence.slots[first : first + len(ids)] for row, ids, first in steps]),
            _tables([row.sequence for row, _, _ in steps]),
            np.concatenate([np.zeros(1, np.int32), ends]),
            kv_lengths,
            ends.astype(np.int64) - 1,
        ]
        ids, positions, slots, tables, starts, lengths, last = (torch.from_numpy(a).to(device) for a in arrays)
        metadata = AttentionMetadata(
            slots=slots,
            block_tables=tables,
            cu_seqlens_q=starts,
            kv_lengths=lengths,
            query_lengths_host=tuple(counts.tolist()),
            kv_lengths_host=tuple(kv_lengths.tolist()),
        )
        is_decode = len(ids) == len(steps)
        inputs = ModelInputs(self._embedded(ids), positions, metadata, None if is_decode else last)
        logits = self.runner.forward(inputs, self._cache)
        likeliest: list[int] = logits[:, : self._vocab_size].argmax(dim=-1).tolist()
        return likeliest

    def _embedded(self, ids: Tensor) -> Tensor:
        """Ids that have an embedding: the model may have more, which no text has."""
        return ids.clamp(max=self.runner.vocab_size - 1)


class DraftedRunner:
    """A model with its draft model, a `runner.Runner`: their layers share one cache, the draft model's behind."""

    def __init__(self, base: Runner, model: DraftModel) -> None:
        self._base = base
        self._model = model
        own, traits = base.traits, model.runner.traits
        rows = [one.position_rows for one in (own, traits) if one.position_rows is not None]
        self.traits: RunnerTraits = dataclasses.replace(
            own,
            position_rows=min(rows, default=None),
            weight_bytes=None if own.weight_bytes is None else own.weight_bytes + (traits.weight_bytes or 0),
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
        return (*self._base.kv_shapes, *self._model.runner.kv_shapes)

    def reserve_positions(self, max_positions: int) -> None:
        for runner in (self._base, self._model.runner):
            runner.reserve_positions(max_positions)

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """The model's logits. Where there are prompts the draft model computes them too."""
        if self._whole is not cache or self._cache is None:
            self._whole, self._cache = cache, cache.layers(0, len(self._base.kv_shapes))
            self._model.use(cache)
        logits = self._base.forward(inputs, self._cache)
        if not inputs.attention.is_decode:
            self._model.follow(inputs)
        return logits


def _tables(rows: list[Sequence]) -> npt.NDArray[np.int32]:
    tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), np.int32)
    for row, table in zip(rows, tables, strict=True):
        table[: len(row.blocks)] = row.blocks
    return tables
