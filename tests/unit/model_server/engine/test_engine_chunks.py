"""Prompts in chunks beside running requests: the arithmetic of the steps, and tokens that do not depend on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_shard import EngineShard, errors_of, generations_of, mixed_requests, said_by, slots_of, tokens_of

from model_server.batch.results import StepResult
from model_server.errors import BatchGoneError
from model_server.text.tokenizer import Tokenizer

LARGE = 20_000


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def tokenizer(tiny_tokenizer: Tokenizer) -> Tokenizer:
    return tiny_tokenizer


def _steps(shard: EngineShard, result: StepResult) -> tuple[tuple[int, ...], dict[int, int]]:
    """Tokens of each row in the step, and how many tokens each request has got."""
    return shard.query_lengths(), {i: len(t) for i, t in tokens_of(result).items()}


def _current(result: StepResult) -> int:
    assert result.batch is not None
    return result.batch.current_tokens


# -- what each step computes, traced -----------------------------------------------------------------------------------


def test_trace_s1_a_long_prompt_alone(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=8)
    a = shard.request(list(range(20)), 3, chunk_len=8)
    result = shard.prefill(0, a)
    assert _steps(shard, result) == ((8,), {}) and _current(result) == 8
    result = shard.decode(0)
    assert _steps(shard, result) == ((8,), {}) and _current(result) == 4
    result = shard.decode(0)
    assert _steps(shard, result) == ((4,), {a.id: 1}) and _current(result) == 1
    results = [result, shard.decode(0), shard.decode(0)]
    assert results[-1].batch is None
    assert tokens_of(*results) == {a.id: shard.expected(a)}


def test_the_router_may_want_short_chunks_for_a_step(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=16)
    a, b = shard.request([1], 9), shard.request(list(range(30)), 2, chunk_len=3)
    results = [shard.prefill(0, a, b, chunk_tokens=3)]
    lengths = [shard.query_lengths()]
    for chunk_tokens in (3, None, 100, None):
        results.append(shard.decode(0, chunk_tokens=chunk_tokens))
        lengths.append(shard.query_lengths())
    assert lengths == [(1, 3), (1, 3), (1, 3), (1, 15), (1, 6)]
    while results[-1].batch is not None:
        results.append(shard.decode(0))
    assert tokens_of(*results) == {r.id: shard.expected(r) for r in (a, b)}


def test_trace_s2_a_third_request_joins(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=8)
    a, b = shard.request([1, 2, 3, 4, 5], 4), shard.request(list(range(10)), 2, chunk_len=3)
    c = shard.request([7, 8, 9], 2)
    results = [shard.prefill(0, a, b)]
    assert _steps(shard, results[-1]) == ((5, 3), {a.id: 1}) and _current(results[-1]) == 8
    results.append(shard.decode(0))
    assert _steps(shard, results[-1]) == ((1, 7), {a.id: 1, b.id: 1}) and _current(results[-1]) == 2
    results.append(shard.prefill(1, c, cached=0))
    assert _steps(shard, results[-1]) == ((1, 1, 3), {a.id: 1, b.id: 1, c.id: 1})
    batch = results[-1].batch
    assert batch is not None and (batch.id, batch.request_ids, batch.current_tokens) == (0, [a.id, c.id], 2)
    results.append(shard.decode(0))
    assert results[-1].batch is None
    assert tokens_of(*results) == {r.id: shard.expected(r) for r in (a, b, c)}


def test_traces_s3_and_s4_the_oldest_takes_the_budget(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=4096, num_blocks=9000)
    shard.runner.max_positions = None
    short = [shard.request([i] * 10, n) for i, n in enumerate([2] * 4 + [50] * 5)]
    a = shard.request([3] * LARGE, 50, chunk_len=4006)
    result = shard.prefill(0, *short, a)
    assert shard.query_lengths() == (10,) * 9 + (4006,)
    assert _current(result) == 4096
    result = shard.decode(0)
    assert shard.query_lengths() == (1,) * 9 + (4087,)
    assert _current(result) == 4092
    b = shard.request([5] * 12_000, 50, chunk_len=4)
    shard.prefill(1, b, cached=0)
    assert shard.query_lengths() == (1,) * 5 + (4087, 4)
    chunks = []
    while True:
        result = shard.decode(0)
        chunks.append(shard.query_lengths()[5:])
        if b.id in tokens_of(result):
            break
    rest_of_a = LARGE - 4006 - 2 * 4087
    assert chunks[:2] == [(4090, 1), (rest_of_a - 4090, 4090 - (rest_of_a - 4090))]
    assert chunks[2] == (1, 4090)
    assert sum(of_a for of_a, _ in chunks[:2]) == rest_of_a
    assert sum(of_b for _, of_b in chunks) == 12_000 - 4


def test_attention_is_told_of_single_tokens_of_prompts(tokenizer: Tokenizer) -> None:
    """Behind a cached prefix and as chunks, beside rows that decode: those have one query, too."""

    def marked() -> list[int] | None:
        assert shard.runner.last_inputs is not None
        marks = shard.runner.last_inputs.attention.single_prompts
        return None if marks is None else marks.tolist()

    shard = EngineShard(tokenizer, budget=8)
    for rows in shard.engine.cache.rows:
        rows.fill_(1)  # what is cached of a prefix
    running, short = shard.request([1, 2], 9), shard.request([3], 9)
    shard.prefill(0, running, short)
    assert marked() == [0, 1]
    shard.decode(0)
    assert marked() is None
    cached = dataclasses.replace(shard.request([1, 2, 3, 4, 5], 9), cache_len=4)
    shard.prefill(1, cached, shard.request([1, 2, 3, 4], 9, chunk_len=3), cached=0)
    assert (shard.query_lengths(), marked()) == ((1, 1, 1, 3), [0, 0, 1, 0])
    shard.decode(0)
    assert (shard.query_lengths(), marked()) == ((1, 1, 1, 1), [0, 0, 0, 1])
    shard.decode(0)
    assert marked() is None


def test_every_unfinished_row_advances_whatever_the_budget(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=1)
    requests = [shard.request([i, 2, 3], 2, chunk_len=1) for i in range(3)]
    first = shard.prefill(0, *requests)
    assert _current(first) == 3
    assert tokens_of(*shard.run_out(first, 0)) == {r.id: shard.expected(r) for r in requests}


# -- the same tokens for every budget ----------------------------------------------------------------------------------


def test_tokens_do_not_depend_on_the_budget(tokenizer: Tokenizer) -> None:
    whole = EngineShard(tokenizer)
    alone = said_by(generations_of(*whole.run_out(whole.prefill(0, *mixed_requests(whole, tokenizer)), 0)))
    assert len(alone) == 9
    ended = [g for generations, _ in alone.values() for _, _, g, _ in generations if g is not None]
    assert len(ended) == 9, "no request failed"
    for budget in range(1, 24):
        shard = EngineShard(tokenizer, budget=budget)
        requests = mixed_requests(shard, tokenizer)
        first = [dataclasses.replace(r, chunk_len=min(len(shard.prompts[r.id]), 1 + budget // 4)) for r in requests]
        assert said_by(generations_of(*shard.run_out(shard.prefill(0, *first), 0))) == alone, budget


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_requests_that_join_one_after_another_change_nobody(tokenizer: Tokenizer, budget: int) -> None:
    whole = EngineShard(tokenizer)
    alone = said_by(generations_of(*whole.run_out(whole.prefill(0, *mixed_requests(whole, tokenizer)), 0)))
    shard = EngineShard(tokenizer, budget=budget)
    first, *others = [dataclasses.replace(r, chunk_len=2) for r in mixed_requests(shard, tokenizer)]
    results = [shard.prefill(0, first)]
    for number, request in enumerate(others, 1):
        results.append(shard.prefill(number, request, cached=0))
        assert results[-1].batch is not None and results[-1].batch.id == 0
        assert results[-1].concat_ns is not None
    assert said_by(generations_of(*results[:-1], *shard.run_out(results[-1], 0))) == alone


def test_prompt_logprobs_come_with_the_first_token_of_the_last_chunk(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=3)
    request = shard.request([1, 2, 3, 4, 5, 6, 7], 2, prefill_logprobs=True, chunk_len=3, top_n_tokens=2)
    found = generations_of(*shard.run_out(shard.prefill(0, request), 0))[request.id]
    prompt = found[0].prefill_tokens
    assert prompt is not None and prompt.ids == [1, 2, 3, 4, 5, 6, 7]
    assert [math.isnan(v) for v in prompt.logprobs] == [True] + [False] * 6
    top = found[0].prefill_top
    assert top is not None and top.count == 2 and len(top.tokens.ids) == len(top.tokens.texts) == 2 * 6
    best, second = top.tokens.logprobs[::2], top.tokens.logprobs[1::2]
    assert all(a >= max(b, c) for a, b, c in zip(best, second, prompt.logprobs[1:], strict=True))
    assert found[1].prefill_tokens is None and found[1].prefill_top is None


# -- a prefix that is in the cache already -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_len", [None, 1, 3])
@pytest.mark.parametrize("cached", [4, 8, 12, 13])
def test_a_cached_prefix_gives_the_same(tokenizer: Tokenizer, cached: int, chunk_len: int | None) -> None:
    shard = EngineShard(tokenizer, budget=4)
    prompt = list(range(2, 16))
    writer = shard.request(prompt, 4)
    expected = tokens_of(*shard.run_out(shard.prefill(0, writer), 0))[writer.id]
    own = shard.request(prompt, 4)
    shared = -(-cached // 4) if cached < 13 else 3
    blocks = np.concatenate([writer.blocks[:shared], own.blocks[shared:]])
    if cached == 13:  # inside a block of its own
        cache = shard.engine.cache.rows[0]
        cache[slots_of(own.blocks)[12]] = cache[slots_of(writer.blocks)[12]]
    if chunk_len is not None:
        chunk_len = min(chunk_len, len(prompt) - cached)
    reader = dataclasses.replace(own, blocks=blocks, cache_len=cached, chunk_len=chunk_len)
    first = shard.prefill(1, reader)
    assert shard.query_lengths() == (chunk_len or len(prompt) - cached,)
    assert tokens_of(*shard.run_out(first, 1)) == {reader.id: expected}


# -- merging while the running batch goes on ---------------------------------------------------------------------------


def test_a_batch_that_ended_normally_gives_its_id(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=8)
    shard.prefill(0, shard.request([1], 1))
    request = shard.request([2, 3], 3)
    result = shard.prefill(1, request, cached=0)
    assert result.batch is not None and result.batch.id == 0
    assert tokens_of(*shard.run_out(result, 0)) == {request.id: shard.expected(request)}


def test_refused_requests_do_not_stop_the_running_ones(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=8)
    running = shard.request([1, 2], 4)
    results = [shard.prefill(0, running)]
    bad = shard.request([3], 2, blocks=np.array([1], np.int32), cache_len=9)
    result = shard.prefill(1, bad, cached=0)
    assert list(errors_of(result)) == [bad.id]
    assert result.batch is not None and result.batch.request_ids == [running.id]
    result.generations[:] = [g for g in result.generations if g.error is None]
    results += shard.run_out(result, 0)
    assert tokens_of(*results) == {running.id: shard.expected(running)}


def test_a_failed_mixed_step_loses_the_running_batch(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=8)
    shard.prefill(0, shard.request([1], 4))
    shard.runner.fail_on = {2: ValueError("broken")}
    with pytest.raises(ValueError, match="broken"):
        shard.prefill(1, shard.request([2], 4), cached=0)
    with pytest.raises(BatchGoneError):
        shard.decode(0)
    with pytest.raises(BatchGoneError):
        shard.prefill(2, shard.request([3], 4), cached=0)
    assert shard.decode(1).batch is None, "nothing is kept under the new batch's id"


def test_filtering_in_the_middle_of_a_prompt(tokenizer: Tokenizer) -> None:
    shard = EngineShard(tokenizer, budget=4)
    gone, kept = shard.request(list(range(20)), 3, chunk_len=4), shard.request(list(range(30, 45)), 3, chunk_len=1)
    shard.prefill(0, gone, kept)
    described = shard.engine.filter(0, [kept.id])
    assert described is not None and described.request_ids == [kept.id]
    assert tokens_of(*shard.run_out(shard.decode(0), 0)) == {kept.id: shard.expected(kept)}


def test_ranks_run_the_same_steps(tokenizer: Tokenizer) -> None:
    ranks = [EngineShard(tokenizer, rank=rank, world_size=2, budget=5) for rank in range(2)]
    said: dict[int, Any] = {}
    results = []
    for shard in ranks:
        first, *others = [dataclasses.replace(r, chunk_len=2) for r in mixed_requests(shard, tokenizer)]
        run = [shard.prefill(0, first)]
        run += [shard.prefill(n, r, cached=0) for n, r in enumerate(others, 1)]
        run = [*run[:-1], *shard.run_out(run[-1], 0)]
        results.append(run)
        said |= said_by(generations_of(*run))
    assert [r.batch for r in results[0]] == [r.batch for r in results[1]]
    whole = EngineShard(tokenizer)
    assert said == said_by(generations_of(*whole.run_out(whole.prefill(0, *mixed_requests(whole, tokenizer)), 0)))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_len": 0}, "chunk_len 0 is not one of the 5 tokens"),
        ({"chunk_len": 6}, "chunk_len 6 is not one of the 5 tokens"),
        ({"cache_len": 3, "chunk_len": 3}, "chunk_len 3 is not one of the 2 tokens"),
        ({"cache_len": 5}, "cache_len 5 must be less than its 5 tokens"),
    ],
)
def test_chunks_that_cannot_be(tokenizer: Tokenizer, changes: dict[str, object], message: str) -> None:
    shard = EngineShard(tokenizer, budget=8)
    request = shard.request([1, 2, 3, 4, 5], 3, **changes)
    assert message in errors_of(shard.prefill(0, request))[request.id]


@pytest.mark.parametrize(("prompt", "message"), [([], "no tokens"), ([1, 10**6], "token 1000000 is outside")])
def test_ids_that_cannot_be_a_prompt(tokenizer: Tokenizer, prompt: list[int], message: str) -> None:
    shard = EngineShard(tokenizer)
    request = shard.request(prompt, 3)
    assert message in errors_of(shard.prefill(0, request))[request.id]
