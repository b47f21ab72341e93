"""A model whose next token is a hash of everything its KV cache holds for the sequence.

It stores token ids as "keys", so a wrong block, slot, position or length changes the answer at once; no weights, no
torch kernels beyond indexing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_server.memory.kv_cache import KvCache, KvShape
from model_server.runner.runner import ModelInputs, RunnerTraits, TokenRow

MODULUS = 1_000_003


def next_token(ids: Sequence[int], vocab_size: int) -> int:
    """The token that follows `ids`, greedily."""
    state = 7
    for token in ids:
        state = (state * 31 + token + 1) % MODULUS
    return state % vocab_size


def greedy(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What a request with this prompt must generate."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids, vocab_size))
    return ids[len(prompt) :]


@dataclass
class FakeRunner:
    """Satisfies `model_server.runner.runner.Runner`. `poisoned` holds last tokens whose row gets NaN scores; `fail_on`
    raises the given error at the n-th forward."""

    vocab_size: int = 64
    max_positions: int | None = 4096
    kv_shapes: tuple[KvShape, ...] = (KvShape(1, 1, 1),)
    poisoned: set[int] = field(default_factory=set)
    fail_on: dict[int, BaseException] = field(default_factory=dict)
    num_forwards: int = 0
    last_inputs: ModelInputs | None = None
    traits: RunnerTraits = RunnerTraits()  # noqa: RUF009 (frozen)
    reserved: int = 0
    longest: int = 0

    def set_longest(self, longest: int) -> None:
        self.longest = longest

    def reserve_positions(self, max_positions: int) -> None:
        self.reserved = max_positions

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        self.num_forwards += 1
        self.last_inputs = inputs
        if self.num_forwards in self.fail_on:
            raise self.fail_on[self.num_forwards]
        metadata = inputs.attention
        stored = (inputs.input_ids + 1).float().view(-1, 1, 1)
        cache.write(0, metadata.slots, stored, stored)
        wanted = None if inputs.logit_rows is None else set(inputs.logit_rows.tolist())
        rows: dict[int, Tensor] = {}
        start = 0
        for i, (num_queries, num_keys) in enumerate(
            zip(metadata.query_lengths_host, metadata.kv_lengths_host, strict=True)
        ):
            keys = cache.keys[0][metadata.block_tables[i].long()].flatten()[:num_keys]
            ids = [int(k) - 1 for k in keys.tolist()]
            positions = inputs.positions[start : start + num_queries].tolist()
            assert positions == list(range(num_keys - num_queries, num_keys)), "positions follow the cache"
            for row, position in enumerate(positions, start):
                if wanted is None or row in wanted:
                    rows[row] = self._scores(ids[: position + 1])
            start += num_queries
        order = range(start) if inputs.logit_rows is None else inputs.logit_rows.tolist()
        return torch.stack([rows[row] for row in order])

    def _scores(self, ids: list[int]) -> Tensor:
        scores = torch.zeros(self.vocab_size)
        scores[next_token(ids, self.vocab_size)] = 10.0
        if ids[-1] in self.poisoned:
            scores[:] = float("nan")
        return scores


@dataclass
class FakeStageRunner(FakeRunner):
    """One stage of a pipeline: it keeps the ids in a cache of its own, takes them from the stage before and hands them
    on. The last stage alone has logits."""

    is_first: bool = True
    is_last: bool = True

    def __post_init__(self) -> None:
        stream = TokenRow(4, torch.float32)
        self.traits = dataclasses.replace(
            self.traits, received=None if self.is_first else stream, passed_on=None if self.is_last else stream
        )

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        assert (inputs.hidden is None) is self.is_first
        if inputs.hidden is not None:
            inputs = dataclasses.replace(inputs, input_ids=inputs.hidden[:, 0].long())
            inputs.hidden.fill_(-1)  # a runner may write into it
        logits = super().forward(inputs, cache)
        return logits if self.is_last else inputs.input_ids.float()[:, None].repeat(1, 4)


@dataclass
class FakeStateRunner:
    """A `Runner` that keeps states: the same next tokens, from ids that each request's state remembers."""

    vocab_size: int = 64
    max_positions: int | None = 4096
    kv_shapes: tuple[KvShape, ...] = ()
    traits: RunnerTraits = RunnerTraits(state_bytes=1000)  # noqa: RUF009 (frozen)
    fail_on: dict[int, BaseException] = field(default_factory=dict)
    num_forwards: int = 0
    last_inputs: ModelInputs | None = None

    def set_longest(self, longest: int) -> None:
        pass

    def reserve_positions(self, max_positions: int) -> None:
        raise AssertionError("no step of it can be captured")

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        self.num_forwards += 1
        self.last_inputs = inputs
        if self.num_forwards in self.fail_on:
            raise self.fail_on[self.num_forwards]
        scores = torch.zeros(len(inputs.input_ids), self.vocab_size)
        row = 0
        metadata = inputs.attention
        for state, count, length in zip(
            inputs.states, metadata.query_lengths_host, metadata.kv_lengths_host, strict=True
        ):
            if count == length:
                state.kept = RememberedIds()
            assert len(state.kept) == length - count, "a state is continued where it stood"
            for token in inputs.input_ids[row : row + count].tolist():
                state.kept.append(token)
                scores[row, next_token(state.kept, self.vocab_size)] = 10.0
                row += 1
        return scores if inputs.logit_rows is None else scores[inputs.logit_rows]


class RememberedIds(list[int]):
    """A list that can be referred to weakly."""
