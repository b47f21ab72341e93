"""Windows that the device makes: cut to slots and tokens, ahead of the host, with the tokens of plain steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.device_windows import Dice, guessing, on_a_gpu
from support.drafts import drafts_in
from support.effort import examples
from support.engine_shard import EngineShard, generations_of, mixed_requests, tokens_of
from support.graph_doubles import CapturableRunner
from support.logprobs import logprobs_of
from torch import Tensor

from model_server.batch.results import FinishReason, GeneratedText, StepResult
from model_server.batch.sequence import NewRequest, Sequence
from model_server.engine.calls import DecodeCall
from model_server.engine.engine import Engine
from model_server.features.drafts.device.speculator import BatchWindows
from model_server.features.drafts.pace import Pace
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
FREE = Pace([(1, 1.0)])
NUM_BLOCKS = 256
WEEKLY = pytest.mark.weekly


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Counting(CapturableRunner):
    """The next token is the last one and 1 more."""

    def _scores(self, ids: list[int]) -> Tensor:
        scores = torch.zeros(self.vocab_size)
        scores[(ids[-1] + 1) % self.vocab_size] = 10.0
        return scores


def drafts(*rows: list[int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """These drafts by turns, of one row."""
    waiting = list(rows)

    def guess(history: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
        draft = (waiting.pop(0) if waiting else [])[:most]
        return torch.tensor([draft + [0] * (most - len(draft))]), torch.tensor([len(draft)])

    return guess


class AlwaysTwo(Dice):
    def length(self, windows: BatchWindows, rows: list[Sequence]) -> int:
        return 2


def traced(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, max_new: int, *guesses: list[int], eos: int | None = None
) -> tuple[EngineShard, NewRequest, list[tuple[list[int], ...]]]:
    """Prompt 10 11 12 in blocks 3 and 7; ids, positions and slots of each forward to come."""
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    runner = Counting(vocab_size=tokenizer.vocab_size)
    shard = on_a_gpu(tokenizer, AlwaysTwo(2, random.Random(0), drafts(*guesses)), runner=runner)
    stops = () if eos is None else (tokenizer.decode_one(eos),)
    stopping = StoppingParameters(max_new_tokens=max_new, ignore_eos_token=True, stop_sequences=stops)
    request = shard.request([10, 11, 12], max_new, stopping=stopping)
    request = dataclasses.replace(request, blocks=np.array([3, 7], np.int32))
    seen: list[tuple[list[int], ...]] = []
    forward = runner.forward

    def noting(inputs, cache):  # type: ignore[no-untyped-def]
        metadata = inputs.attention
        seen.append((inputs.input_ids.tolist(), inputs.positions.tolist(), metadata.slots.tolist()))
        padding = metadata.slots == 0
        assert not metadata.is_decode or (
            (metadata.kv_lengths[padding] == 1).all() and not metadata.block_tables[padding].any()
        )
        return forward(inputs, cache)

    runner.forward = noting  # type: ignore[method-assign]
    return shard, request, seen


def ended(shard: EngineShard, results: list[object], request: NewRequest) -> GeneratedText:
    found = generations_of(*results)[request.id][-1].generated_text  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_draft_that_is_half_right(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, request, seen = traced(tiny_tokenizer, monkeypatch, 6, [14, 99 % 60], [16, 17])
    results = [shard.prefill(0, request), shard.decode(0), shard.decode(0)]
    assert [step[0][:3] for step in seen[-2:]] == [[13, 14, 39], [15, 16, 17]]
    assert [step[1][:3] for step in seen[-2:]] == [[3, 4, 5], [5, 6, 7]]
    assert [step[2][:3] for step in seen[-2:]] == [[15, 28, 29], [29, 30, 31]]
    assert [tokens_of(one)[request.id] for one in results] == [[13], [14, 15], [16, 17, 18]]
    text = ended(shard, results, request)
    assert text.finish_reason is FinishReason.LENGTH and text.generated_tokens == 6
    assert results[-1].batch is None
    assert [(one.num_tokens, one.num_right) for one in drafts_in(results[1:])] == [(2, 1), (2, 2)]


def test_a_window_is_cut_to_what_is_left(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, request, seen = traced(tiny_tokenizer, monkeypatch, 5, [14, 39], [16, 17])
    results = [shard.prefill(0, request), shard.decode(0), shard.decode(0)]
    assert seen[-1][0][:3] == [15, 16, 0] and seen[-1][1][:3] == [5, 6, 0] and seen[-1][2][:3] == [29, 30, 0]
    assert tokens_of(results[-1])[request.id] == [16, 17]
    assert ended(shard, results, request).finish_reason is FinishReason.LENGTH


def test_a_step_behind_an_end_is_idle(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 ends the request; the step that is on its way by then has neither tokens nor slots left for it."""
    shard, request, seen = traced(tiny_tokenizer, monkeypatch, 6, [14, 39], [16, 17], eos=16)
    results = [shard.prefill(0, request), shard.decode(0)]
    second = shard.submit_decode(0)
    assert shard.engine.may_overlap(DecodeCall(batch_ids=(0,), sequence=4, unanswered=1))
    third = shard.submit_decode(0)
    assert not any(seen[-1][0][:3]) and not any(seen[-1][2][:3])
    results += [second(), third()]
    assert tokens_of(*results)[request.id] == [13, 14, 15, 16]
    text = ended(shard, results, request)
    assert text.finish_reason is FinishReason.STOP_SEQUENCE and text.generated_tokens == 4
    assert not results[-1].generations and results[-1].batch is None


def said(shard: EngineShard, requests: list[NewRequest], *, ahead: bool) -> dict[int, object]:
    """Ids, logprobs, top tokens and end of each request."""
    return said_in(answers(shard, requests, ahead=ahead))


def answers(shard: EngineShard, requests: list[NewRequest], *, ahead: bool) -> list[StepResult]:
    """Of all steps until the requests have ended."""
    results = [shard.prefill(0, *requests)]
    waiting = None
    while results[-1].batch is not None:
        if not ahead:
            results.append(shard.decode(0))
            continue
        call = DecodeCall(batch_ids=(0,), sequence=1, unanswered=int(waiting is not None))
        if waiting is not None and not shard.engine.may_overlap(call):
            results.append(waiting())
            waiting = None
            continue
        following = shard.engine.submit_decode(call)
        if waiting is not None:
            results.append(waiting())
        waiting = following
    if waiting is not None:
        results.append(waiting())
    return results


def said_in(results: list[StepResult]) -> dict[int, object]:
    """Ids, logprobs, top tokens and end of each request."""
    found: dict[int, object] = {}
    for request_id, generations in generations_of(*results).items():
        tokens = [g.tokens for g in generations if g.tokens is not None]
        found[request_id] = (
            [i for t in tokens for i in t.ids],
            logprobs_of(v for t in tokens for v in t.logprobs),
            [(t.ids, logprobs_of(t.logprobs)) for g in generations for t in g.top_tokens],
            generations[-1].generated_text,
            [g.error for g in generations if g.error is not None],
        )
    return found


@pytest.mark.random
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("wrong", [pytest.param(0.0, marks=WEEKLY), 0.2, pytest.param(1.0, marks=WEEKLY)])
@pytest.mark.parametrize("kinds", ["all", "without grammar"])
def test_each_kind_of_row_says_what_it_says_without_drafts(
    tiny_tokenizer: Tokenizer, wrong: float, ahead: bool, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = EngineShard(tiny_tokenizer, budget=1000)
    kept = [n for n, one in enumerate(mixed_requests(plain, tiny_tokenizer)) if kinds == "all" or n not in (4, 7)]

    def chosen(shard: EngineShard) -> list[NewRequest]:
        requests = mixed_requests(shard, tiny_tokenizer)
        return [requests[number] for number in kept]

    plain = EngineShard(tiny_tokenizer, budget=1000)
    wanted = said(plain, chosen(plain), ahead=False)
    monkeypatch.setattr(Engine, "_runs_ahead", ahead)
    for seed in range(examples(1, 3)):
        dice = random.Random(seed)
        speculator = Dice(5, dice, guessing(tiny_tokenizer.vocab_size, dice, wrong))
        shard = on_a_gpu(tiny_tokenizer, speculator)
        assert said(shard, chosen(shard), ahead=ahead) == wanted
        assert (speculator.num_windows > 0) is (kinds != "all")


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_batches_merge_whose_windows_were_their_own(
    tiny_tokenizer: Tokenizer, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then plain steps count what was said in both."""
    monkeypatch.setattr(Engine, "_runs_ahead", ahead)
    likely = tuple((token, 40.0 - token / 10) for token in range(20, 60))
    penalised = SamplingParameters(presence_penalty=20.0, logit_bias=likely)

    def tokens(*, apart: bool) -> dict[int, list[int]]:
        dice = random.Random(1)
        speculator = Dice(3, dice, guessing(tiny_tokenizer.vocab_size, dice, 0.3))
        shard = on_a_gpu(tiny_tokenizer, speculator)
        requests = [shard.request([5, 6, 7], 24, sampling=penalised), shard.request([9, 8], 24, sampling=penalised)]
        results = [shard.prefill(number, request) for number, request in enumerate(requests)]
        results += [shard.decode(number) for number in (0, 1, 0, 1, 0, 1) if apart]
        assert speculator.num_windows > 2 or not apart
        with monkeypatch.context() as patch:
            patch.setattr(speculator, "on_device", lambda *_: False)
            return tokens_of(*results, *shard.run_out(shard.decode(0, 1), 0))

    assert tokens(apart=True) == tokens(apart=False)
