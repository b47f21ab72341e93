"""Prefill, decode, filter, merge and failure of batches, on a model that reveals any wrong place in the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine_shard import NUM_BLOCKS, decode_call, errors_of, slots_of, tokens_of
from support.engine_shard import EngineShard as Shard
from support.tiny_models import write_tokenizer

from model_server.batch.results import FinishReason, Generation, StepResult
from model_server.engine.calls import DecodeCall
from model_server.engine.engine import Engine
from model_server.errors import BatchGoneError, FatalError, OutOfMemoryError
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampled
from model_server.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture
def shard(tokenizer: Tokenizer) -> Iterator[Shard]:
    with torch.inference_mode():
        yield Shard(tokenizer)


def _run_out(shard: Shard, first: StepResult, batch_id: int) -> dict[int, list[int]]:
    return tokens_of(*shard.run_out(first, batch_id))


def test_one_request_with_one_token_leaves_nothing_behind(shard: Shard) -> None:
    request = shard.request([1, 2, 3], 1)
    result = shard.prefill(0, request)
    assert result.batch is None
    (generation,) = result.generations
    assert generation.tokens is not None and generation.tokens.ids == shard.expected(request)
    assert generation.generated_text is not None
    assert generation.generated_text.finish_reason is FinishReason.LENGTH
    assert generation.generated_text.generated_tokens == 1
    assert shard.decode(0).generations == []


def test_a_batch_gives_each_request_what_it_gets_alone(shard: Shard) -> None:
    requests = [shard.request(list(range(1, n)), m) for n, m in [(3, 9), (8, 2), (14, 5), (2, 12)]]
    tokens = _run_out(shard, shard.prefill(0, *requests), 0)
    assert tokens == {r.id: shard.expected(r) for r in requests}


def test_a_request_that_ended_leaves_the_batch_at_once(shard: Shard) -> None:
    short, long = shard.request([5], 1), shard.request([6], 3)
    result = shard.prefill(0, short, long)
    assert result.batch is not None and result.batch.request_ids == [long.id]
    assert result.batch.current_tokens == 1


def test_merged_batches_take_the_first_id_and_order(shard: Shard) -> None:
    a, b = shard.request([1, 2], 4), shard.request([3], 4)
    first, second = shard.prefill(0, a), shard.prefill(1, b)
    merged = shard.decode(0, 1)
    assert merged.batch is not None and merged.batch.id == 0
    assert merged.batch.request_ids == [a.id, b.id]
    assert merged.concat_ns is not None
    assert shard.decode(1).batch is None
    rest = [shard.decode(0), shard.decode(0)]
    assert rest[-1].batch is None
    assert tokens_of(first, second, merged, *rest) == {r.id: shard.expected(r) for r in (a, b)}


def test_what_ended_normally_is_skipped(shard: Shard) -> None:
    done = shard.prefill(0, shard.request([1], 1))
    assert done.batch is None
    assert shard.decode(0).generations == []
    assert shard.engine.filter(0, [0]) is None
    going = shard.request([2], 3)
    shard.prefill(1, going)
    merged = shard.decode(0, 1)
    assert merged.batch is not None and merged.batch.request_ids == [going.id]
    kept = shard.engine.filter(1, [going.id, 12345])
    assert kept is not None and kept.request_ids == [going.id]


def test_filter_keeps_the_order_of_the_batch(shard: Shard) -> None:
    requests = [shard.request([i + 1], 4) for i in range(4)]
    results = [shard.prefill(0, *requests)]
    kept = shard.engine.filter(0, [requests[3].id, requests[1].id])
    assert kept is not None and kept.request_ids == [requests[1].id, requests[3].id]
    while results[-1].batch is not None:
        results.append(shard.decode(0))
    tokens = tokens_of(*results)
    assert tokens[requests[1].id] == shard.expected(requests[1])
    assert tokens[requests[3].id] == shard.expected(requests[3])


def test_clear_forgets_one_or_all(shard: Shard) -> None:
    for batch_id in (0, 1, 2):
        shard.prefill(batch_id, shard.request([1], 3))
    shard.engine.clear(99)
    shard.engine.clear(1)
    assert shard.decode(1).batch is None
    shard.engine.clear(None)
    for batch_id in (0, 2):
        assert shard.decode(batch_id).batch is None


def test_each_rank_answers_for_its_own_requests(tokenizer: Tokenizer) -> None:
    answered: list[set[int]] = []
    with torch.inference_mode():
        for rank in (0, 1):
            shard = Shard(tokenizer, rank=rank, world_size=2)
            requests = [shard.request([i + 1, i + 2], 5) for i in range(4)]
            tokens = _run_out(shard, shard.prefill(0, *requests), 0)
            assert tokens == {r.id: shard.expected(r) for r in requests if r.id % 2 == rank}
            answered.append(set(tokens))
    assert answered == [{0, 2}, {1, 3}]


@pytest.mark.parametrize("case", ["mid-batch", "last"])
def test_a_row_without_scores_fails_alone(shard: Shard, case: str) -> None:
    good = shard.request([1, 2, 3], 6)
    bad = shard.request([9, 10], 6)
    order = (bad, good) if case == "mid-batch" else (good, bad)
    shard.runner.poisoned = {shard.expected(bad)[1]}
    results = [shard.prefill(0, *order)]
    while results[-1].batch is not None:
        results.append(shard.decode(0))
    generations: list[Generation] = [g for r in results for g in r.generations]
    errors = [g for g in generations if g.error is not None]
    assert [g.request_id for g in errors] == [bad.id]
    tokens = [t for g in generations if g.request_id == good.id and g.tokens for t in g.tokens.ids]
    assert tokens == shard.expected(good)


def test_a_failed_step_loses_its_batch_and_only_that(shard: Shard) -> None:
    safe, doomed = shard.request([1], 4), shard.request([2], 4)
    first = shard.prefill(0, safe)
    shard.prefill(1, doomed)
    shard.runner.fail_on = {shard.runner.num_forwards + 1: ValueError("broken")}
    with pytest.raises(ValueError, match="broken"):
        shard.decode(1)
    with pytest.raises(BatchGoneError):
        shard.decode(1)
    shard.engine.clear(1)
    assert shard.decode(1).batch is None
    assert _run_out(shard, first, 0) == {safe.id: shard.expected(safe)}


def test_running_out_of_memory_is_not_the_end(shard: Shard) -> None:
    shard.runner.fail_on = {1: torch.OutOfMemoryError("no memory")}
    with pytest.raises(OutOfMemoryError, match="--max-batch-prefill-tokens"):
        shard.prefill(0, shard.request([1], 2))
    request = shard.request([1], 2)
    assert _run_out(shard, shard.prefill(1, request), 1) == {request.id: shard.expected(request)}


def test_running_out_of_memory_ends_one_of_several_ranks(tokenizer: Tokenizer) -> None:
    # The others wait for it inside a collective; whatever it computed next would be added to the wrong sum.
    shard = Shard(tokenizer, world_size=2)
    shard.runner.fail_on = {1: torch.OutOfMemoryError("no memory")}
    with pytest.raises(FatalError, match="--max-batch-prefill-tokens"):
        shard.prefill(0, shard.request([1], 2))


def test_a_step_submitted_before_the_last_is_collected_gives_the_same_tokens(shard: Shard) -> None:
    requests = [shard.request([i + 1] * (i + 1), m) for i, m in enumerate([2, 6, 4])]
    collects = [shard.submit_prefill(0, *requests)]
    results = []
    for _ in range(8):
        collects.append(shard.submit_decode(0))
        results.append(collects.pop(0)())
    results.append(collects.pop(0)())
    assert tokens_of(*results) == {r.id: shard.expected(r) for r in requests}
    assert results[-1].batch is None


def test_what_a_step_computes_for_a_request_that_ended_is_discarded(shard: Shard, tokenizer: Tokenizer) -> None:
    request, other = shard.request([1, 2], 8), shard.request([7], 8)
    stop = tokenizer.decode_one(shard.expected(request)[2])
    assert stop
    stopping = StoppingParameters(max_new_tokens=8, ignore_eos_token=True, stop_sequences=(stop,))
    request = dataclasses.replace(request, stopping=stopping)
    collects = [shard.submit_prefill(0, request, other)]
    results = []
    for _ in range(10):
        collects.append(shard.submit_decode(0))
        results.append(collects.pop(0)())
    results.append(collects.pop(0)())
    tokens = tokens_of(*results)
    ended = [g.generated_text for r in results for g in r.generations if g.request_id == request.id][-1]
    assert ended is not None and ended.finish_reason is FinishReason.STOP_SEQUENCE
    assert tokens[request.id] == shard.expected(request)[: ended.generated_tokens]
    assert tokens[other.id] == shard.expected(other)


def test_a_step_is_waited_for_beside_the_next_call_only_where_that_could_be_submitted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampled, "is_over", lambda self: False)
    for world_size, device, over in ((1, "cuda", False), (2, "cuda", False), (1, "cpu", True)):
        shard = Shard(tokenizer, world_size=world_size)
        options = shard.engine.options
        with torch.inference_mode():
            shard.prefill(0, shard.request([1, 2], 4))
            assert shard.engine.is_over(), "nothing is submitted"
            collect = shard.submit_decode(0)
            shard.engine.options = dataclasses.replace(options, device=torch.device(device))
            assert shard.engine.is_over() is over
            shard.engine.options = options
            collect()
        assert shard.engine.is_over()


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_a_call_that_says_what_was_unanswered_is_submitted_ahead(tokenizer: Tokenizer, world_size: int) -> None:
    shard = Shard(tokenizer, world_size=world_size)
    options = shard.engine.options
    with torch.inference_mode():
        collect = shard.submit_prefill(0, shard.request([1, 2], 4))
        shard.engine.options = dataclasses.replace(options, device=torch.device("cuda"))
        assert shard.engine.may_overlap(decode_call(0))
        assert not shard.engine.may_overlap(dataclasses.replace(decode_call(0), unanswered=0))
        shard.engine.options = options
        collect()


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "late"])
def test_a_request_that_ended_takes_part_in_calls_that_do_not_know_of_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Whether a rank has collected its last step by then or not; and in no later ones."""
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    shard = Shard(tokenizer)
    with torch.inference_mode():
        first, second = shard.request([1, 2], 9), shard.request([3], 9)
        collect = shard.submit_prefill(0, first, second)
        shard.engine._store.find(0).batch.sequences[0].stopping.check = lambda *_: FinishReason.STOP_SEQUENCE  # type: ignore[method-assign]
        call = DecodeCall(batch_ids=(0,), sequence=2, unanswered=1)
        if is_late:
            assert collect().batch.request_ids == [second.id]
            late = shard.engine.submit_decode(call)
        else:
            late = shard.engine.submit_decode(call)
            assert collect().batch.request_ids == [second.id]
        assert shard.query_lengths() == (1, 1)
        result = late()
        assert [g.request_id for g in result.generations] == [second.id] == result.batch.request_ids
        shard.engine.submit_decode(DecodeCall(batch_ids=(0,), sequence=3, unanswered=0))()
        assert shard.query_lengths() == (1,)


def test_text_work_that_fails_on_one_rank_leaves_the_ranks_in_step(tokenizer: Tokenizer) -> None:
    """Only the rank that answers for a request makes its text; the others cannot know that this failed."""

    def broken(token_id: int) -> str:
        raise ValueError("no text")

    ranks = [Shard(tokenizer, rank=rank, world_size=2) for rank in range(2)]
    with torch.inference_mode():
        results = [s.prefill(0, s.request([1, 2], 6), s.request([3], 6)) for s in ranks]
        owner = ranks[0].engine._store.find(0).batch.sequences[0]
        assert owner.detokenizer is not None
        owner.detokenizer.append = broken  # type: ignore[method-assign]
        for _ in range(5):
            results = [s.decode(0) for s in ranks]
            errors = [[g.request_id for g in r.generations if g.error] for r in results]
            seen = [None if s.runner.last_inputs is None else s.runner.last_inputs.input_ids.tolist() for s in ranks]
            assert seen[0] == seen[1]
            assert results[0].batch == results[1].batch
            if not any(errors):
                assert [g.request_id for r in results for g in r.generations] == [1]
        assert results[0].batch is None


def test_nothing_is_written_past_the_reserved_slots(shard: Shard) -> None:
    request = shard.request([1, 2, 3], 4)
    collects = [shard.submit_prefill(0, request)]
    collects.extend(shard.submit_decode(0) for _ in range(6))
    for collect in collects:
        collect()
    stored = shard.engine.cache.keys[0].flatten().isfinite().nonzero().flatten().tolist()
    assert sorted(stored) == sorted(slots_of(request.blocks)[: 3 + 4 - 1])


def test_requests_without_blocks_are_numbered_from_zero(shard: Shard) -> None:
    empty = np.array([], np.int32)
    requests = [shard.request([1, 2, 3], 4, blocks=empty), shard.request([4, 5], 6, blocks=empty)]
    tokens = _run_out(shard, shard.prefill(0, *requests), 0)
    assert tokens == {r.id: shard.expected(r) for r in requests}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": np.array([1], np.int32)}, "1 blocks for 6 tokens"),
        ({"blocks": np.array([1, NUM_BLOCKS], np.int32)}, "outside the cache"),
        ({"cache_len": 3}, "cache_len 3 must be less than its 3 tokens"),
        ({"chunk_len": 2}, "does not chunk"),
    ],
)
def test_a_request_with_a_wrong_layout_is_refused_alone(shard: Shard, changes: dict[str, object], message: str) -> None:
    bad, good = shard.request([1, 2, 3], 4, **changes), shard.request([4, 5], 3)
    result = shard.prefill(0, bad, good)
    (refused,) = [g for g in result.generations if g.error is not None]
    assert refused.request_id == bad.id and message in str(refused.error)
    result.generations.remove(refused)
    assert _run_out(shard, result, 0) == {good.id: shard.expected(good)}


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"adapter_id": "poems"}, "no adapter 'poems' is loaded"), ({"adapter_id": 7}, "no adapter is loaded under 7")],
)
def test_a_request_that_names_an_adapter_is_refused_alone(shard: Shard, asked: dict[str, object], message: str) -> None:
    bad, good = shard.request([1, 2, 3], 4, **asked), shard.request([4, 5], 3)
    result = shard.prefill(0, bad, good)
    assert errors_of(result) == {bad.id: f"request {bad.id}: {message}"}
    result.generations[:] = [g for g in result.generations if g.error is None]
    assert _run_out(shard, result, 0) == {good.id: shard.expected(good)}


def test_a_batch_of_nothing_but_bad_requests_leaves_nothing(shard: Shard) -> None:
    bias = SamplingParameters(logit_bias=((shard.runner.vocab_size, 1.0),))
    result = shard.prefill(0, shard.request([1], 2, sampling=bias))
    assert result.batch is None and result.generations[0].error
    assert shard.decode(0).generations == []


def test_prompt_logprobs_come_with_the_first_token(shard: Shard) -> None:
    wanted = shard.request([1, 2, 3, 4], 2, prefill_logprobs=True)
    plain = shard.request([5, 6], 2)
    result = shard.prefill(0, plain, wanted)
    by_id = {g.request_id: g for g in result.generations}
    assert by_id[plain.id].prefill_tokens is None
    prompt = by_id[wanted.id].prefill_tokens
    assert prompt is not None
    assert prompt.ids == [1, 2, 3, 4] and prompt.is_special == []
    assert np.isnan(prompt.logprobs[0]) and not np.isnan(prompt.logprobs[1:]).any()
    assert by_id[wanted.id].tokens is not None
    assert by_id[wanted.id].tokens.ids == shard.expected(wanted)[:1]  # type: ignore[union-attr]


def test_top_tokens_are_listed_most_likely_first(shard: Shard) -> None:
    result = shard.prefill(0, shard.request([1, 2], 2, top_n_tokens=1))
    (generation,) = result.generations
    assert generation.tokens is not None
    assert generation.top_tokens[0].ids[0] == generation.tokens.ids[0]


def test_a_chosen_token_has_one_log_probability(shard: Shard) -> None:
    requests = [shard.request([1, number], 2, top_n_tokens=3) for number in range(2, 12)]
    for batch, request in enumerate(requests):
        (generation,) = shard.prefill(batch, request).generations
        assert generation.tokens is not None
        assert generation.top_tokens[0].logprobs[0] == generation.tokens.logprobs[0]
