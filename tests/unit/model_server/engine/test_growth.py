"""Blocks that requests get while they run: at every edge, never in a wrong place, never for nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.engine_shard import BLOCK, NUM_BLOCKS, EngineShard, decode_call, errors_of, slots_of, tokens_of

from model_server.batch.growth import BlockGrowth
from model_server.batch.results import StepResult
from model_server.batch.sequence import NewRequest
from model_server.engine.calls import PrefillCall
from model_server.errors import BatchGoneError
from model_server.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def shard(tiny_tokenizer: Tokenizer) -> EngineShard:
    return EngineShard(tiny_tokenizer, budget=8, grows=True)


def _growth(request: NewRequest, *blocks: int) -> BlockGrowth:
    return BlockGrowth(request.id, np.array(blocks, np.int64))


def _run_growing(shard: EngineShard, requests: list[NewRequest], *, ahead: int = 0) -> list[StepResult]:
    """Decode to the end; each request gets a block when the token `ahead` of its next one has no slot."""
    covered = {r.id: len(r.blocks) * BLOCK for r in requests}
    written = {r.id: len(shard.prompts[r.id]) for r in requests}
    by_id = {r.id: r for r in requests}
    results = [shard.prefill(0, *requests)]
    while (batch := results[-1].batch) is not None:
        growth = []
        for request_id in batch.request_ids:
            if written[request_id] + ahead >= covered[request_id]:
                growth.append(_growth(by_id[request_id], *shard.blocks(1)))
                covered[request_id] += BLOCK
            written[request_id] += 1
        results.append(shard.decode(0, new_blocks=growth))
    return results


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_growth_at_every_edge_of_a_block(shard: EngineShard, ahead: int) -> None:
    requests = [shard.request(list(range(2, 2 + n)), 11 - n, tokens=n) for n in range(1, 10)]
    results = _run_growing(shard, requests, ahead=ahead)
    assert tokens_of(*results) == {r.id: shard.expected(r) for r in requests}


def test_the_batch_counts_the_blocks_it_got(shard: EngineShard) -> None:
    request = shard.request([1, 2, 3, 4], 9, tokens=4)
    first = shard.prefill(0, request)
    assert first.batch is not None and first.batch.max_tokens == BLOCK
    second = shard.decode(0, new_blocks=[_growth(request, *shard.blocks(8))])
    assert second.batch is not None and second.batch.max_tokens == 3 * BLOCK


def test_blocks_come_with_a_prefill_too(shard: EngineShard) -> None:
    running, new = shard.request([1, 2, 3, 4], 5, tokens=4), shard.request([5, 6], 3)
    results = [shard.prefill(0, running)]
    results.append(shard.prefill(1, new, cached=0, new_blocks=[_growth(running, *shard.blocks(4))]))
    results = [*results[:-1], *shard.run_out(results[-1], 0)]
    assert tokens_of(*results) == {r.id: shard.expected(r) for r in (running, new)}


def test_blocks_come_while_the_prompt_is_unfinished(shard: EngineShard) -> None:
    request = shard.request(list(range(12)), 5, tokens=12, chunk_len=8)
    results = [shard.prefill(0, request), shard.decode(0, new_blocks=[_growth(request, *shard.blocks(4))])]
    assert tokens_of(*results[:-1], *shard.run_out(results[-1], 0)) == {request.id: shard.expected(request)}


def test_a_row_without_room_fails_alone_and_writes_nowhere(shard: EngineShard) -> None:
    short, other = shard.request([1, 2, 3], 9, tokens=3), shard.request([5, 6], 9)
    results = [shard.prefill(0, short, other), shard.decode(0)]
    before = shard.engine.cache.rows[0].clone()
    results.append(shard.decode(0))
    assert f"{BLOCK} slots" in errors_of(results[-1])[short.id]
    changed = (shard.engine.cache.rows[0] != before) & ~(shard.engine.cache.rows[0].isnan() & before.isnan())
    assert changed.any(1).nonzero().flatten().tolist() == slots_of(other.blocks)[3:4]
    results[-1].generations[:] = [g for g in results[-1].generations if g.error is None]
    results = [*results[:-1], *shard.run_out(results[-1], 0)]
    assert tokens_of(*results)[other.id] == shard.expected(other)
    assert tokens_of(*results)[short.id] == shard.expected(short)[:2]


def test_a_batch_of_rows_without_room_ends(shard: EngineShard) -> None:
    request = shard.request([1, 2, 3, 4], 9, tokens=4)
    shard.prefill(0, request)
    result = shard.decode(0)
    assert list(errors_of(result)) == [request.id] and result.batch is None
    assert shard.decode(0).generations == []


def test_the_last_token_needs_no_slot(shard: EngineShard) -> None:
    request = shard.request([1, 2, 3], 2, tokens=3)
    assert tokens_of(*shard.run_out(shard.prefill(0, request), 0)) == {request.id: shard.expected(request)}


def test_blocks_outside_of_the_cache_are_that_rows_error(shard: EngineShard) -> None:
    bad, good = shard.request([1, 2, 3, 4], 4, tokens=5), shard.request([5], 3)
    shard.prefill(0, bad, good)
    result = shard.decode(0, new_blocks=[_growth(bad, NUM_BLOCKS)])
    assert "outside the cache" in errors_of(result)[bad.id]
    assert result.batch is not None and result.batch.request_ids == [good.id]


def test_a_request_that_is_named_twice_fails_once(shard: EngineShard) -> None:
    bad, good = shard.request([1, 2, 3, 4], 4, tokens=5), shard.request([5], 3)
    shard.prefill(0, bad, good)
    result = shard.decode(0, new_blocks=[_growth(bad, NUM_BLOCKS), _growth(bad, NUM_BLOCKS + 1)])
    assert [g.request_id for g in result.generations if g.error is not None] == [bad.id]


def test_blocks_of_a_request_that_ended_are_skipped(shard: EngineShard) -> None:
    done, going = shard.request([1], 1), shard.request([2], 4)
    results = [shard.prefill(0, done, going)]
    growth = [_growth(done, 9), BlockGrowth(12345, np.array([9], np.int64))]
    results += shard.run_out(shard.decode(0, new_blocks=growth), 0)
    assert tokens_of(*results)[going.id] == shard.expected(going)
    assert shard.decode(0, new_blocks=growth).generations == []


def test_where_nothing_grows_everything_is_reserved_at_the_start(tiny_tokenizer: Tokenizer) -> None:
    shard = EngineShard(tiny_tokenizer, budget=8)
    request = shard.request([1, 2, 3], 9, tokens=3)
    assert "1 blocks for 11 tokens" in errors_of(shard.prefill(0, request))[request.id]


def test_a_resumed_request_needs_room_for_what_it_generated(shard: EngineShard) -> None:
    request = shard.request([1, 2, 3], 9, tokens=4, resume_ids=(7, 8))
    assert "1 blocks for 5 tokens" in errors_of(shard.prefill(0, request))[request.id]


# -- launching ahead ---------------------------------------------------------------------------------------------------


def _on_a_device(shard: EngineShard, growth: list[BlockGrowth]) -> bool:
    """Would a decode be launched ahead if the launched step were on an asynchronous device?"""
    options = shard.engine.options
    shard.engine.options = dataclasses.replace(options, device=torch.device("cuda"))
    try:
        return shard.engine.may_overlap(decode_call(0, new_blocks=growth))
    finally:
        shard.engine.options = options


def test_growth_that_fits_does_not_hold_up_the_next_step(shard: EngineShard) -> None:
    request = shard.request([1, 2, 3, 4], 9, tokens=4)
    finishes = [shard.submit_prefill(0, request)]
    (block,) = shard.blocks(4)
    assert not _on_a_device(shard, []), "a row without room may have ended in the step before"
    assert not _on_a_device(shard, [_growth(request, NUM_BLOCKS)])
    assert not _on_a_device(shard, [_growth(request)])
    growth = [_growth(request, block)]
    assert _on_a_device(shard, growth)
    finishes.append(shard.submit_decode(0, new_blocks=growth))
    results = [finish() for finish in finishes]
    assert tokens_of(*results) == {request.id: shard.expected(request)[:2]}
    assert shard.engine.cache.keys[0].flatten()[slots_of([block])[0]].isfinite()


def test_steps_with_chunks_of_a_prompt_are_launched_ahead(shard: EngineShard) -> None:
    """The running row's ids come from the step before, those of the prompt from the host."""
    running, long = shard.request([1], 9), shard.request(list(range(12)), 2, chunk_len=4)
    finishes = [shard.submit_prefill(0, running, long)]
    results = []
    for _ in range(3):
        assert _on_a_device(shard, [])
        finishes.append(shard.submit_decode(0))
        results.append(finishes.pop(0)())
    results += [finish() for finish in finishes]
    said = tokens_of(*results)
    assert said[running.id] == shard.expected(running)[: len(said[running.id])] and len(said[running.id]) == 4
    assert said[long.id] == shard.expected(long)


def test_requests_join_ahead_and_the_step_before_does_not_tell_of_them(shard: EngineShard) -> None:
    first, second = shard.request([1], 2), shard.request([3, 4], 3)
    finish = shard.submit_prefill(0, first)
    assert _joins_on_a_device(shard)
    joined = shard.submit_prefill(1, second, cached=0)
    results = [finish(), joined()]
    assert [one.batch.request_ids if one.batch else None for one in results] == [[first.id], [second.id]]
    results += [shard.decode(0), shard.decode(0)]
    assert tokens_of(*results) == {one.id: shard.expected(one) for one in (first, second)}


def test_a_prefill_that_fails_leaves_the_step_before_its_answer(shard: EngineShard) -> None:
    running = shard.request([1], 9)
    finish = shard.submit_prefill(0, running)
    shard.runner.forward = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        shard.submit_prefill(1, shard.request([2], 4), cached=0)
    assert tokens_of(finish()) == {running.id: shard.expected(running)[:1]}
    with pytest.raises(BatchGoneError):
        shard.decode(0)


def _joins_on_a_device(shard: EngineShard) -> bool:
    options = shard.engine.options
    shard.engine.options = dataclasses.replace(options, device=torch.device("cuda"))
    try:
        return shard.engine.may_overlap(PrefillCall(batch_id=1, cached_id=0, sequence=2, unanswered=1))
    finally:
        shard.engine.options = options
