"""Steps that give a row several tokens: each request says what it says with one token a step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch
from support.drafts import speculator_of, use_drafts
from support.engine_shard import EngineShard, generations_of, mixed_requests, tokens_of
from support.fake_model import FakeRunner
from support.logprobs import logprobs_of

from model_server.batch.results import FinishReason, Generation
from model_server.batch.sequence import NewRequest, Sequence
from model_server.features.drafts.report import Drafted
from model_server.features.drafts.speculator import Compute, Speculator
from model_server.features.drafts.window import CheckedTokens, Window
from model_server.runner.runner import Kept
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Oracle(Speculator):
    """Drafts what the request says next, up to `most` - 1 tokens by the dice, and some of them wrong.

    known: what requests say in all; the others say what the fake model finds most likely.
    """

    def __init__(self, runner: FakeRunner, most: int, seed: int, wrong: float, known: dict[int, list[int]]) -> None:
        super().__init__(most)
        self.runner, self.dice, self.wrong, self.known = runner, random.Random(seed), wrong, known
        self.num_drafted = self.num_right = 0

    def note(self, window: Window, checked: CheckedTokens, kept: Kept | None = None) -> Drafted:
        drafted = super().note(window, checked, kept)
        self.num_drafted += drafted.num_tokens
        self.num_right += drafted.num_right
        return drafted

    def window(self, rows: list[Sequence], compute: Compute | None = None) -> Window:
        return Window(rows, [self._guess(sequence) for sequence in rows])

    def _guess(self, sequence: Sequence) -> list[int]:
        ids, most = list(sequence.ids), min(self.dice.randint(0, self.most - 1), self.longest(sequence))
        for _ in range(most):
            known = self.known.get(sequence.id, [])[len(ids) - sequence.prompt_length :]
            right = known[0] if known else int(self.runner._scores(ids).argmax())
            ids.append(self.dice.randrange(60) if self.dice.random() < self.wrong else right)
        draft = ids[len(sequence.ids) :]
        return draft if sequence.row.grammar is None else sequence.row.grammar.possible(draft)


def several(
    tokenizer: Tokenizer,
    most: int = 4,
    seed: int = 0,
    wrong: float = 0.1,
    known: dict[int, list[int]] | None = None,
    **options: object,
) -> EngineShard:
    shard = EngineShard(tokenizer, budget=1000, **options)  # type: ignore[arg-type]
    assert isinstance(shard.runner, FakeRunner)
    use_drafts(shard.engine, Oracle(shard.runner, most, seed, wrong, known or {}))
    return shard


def said(shard: EngineShard, requests: list[NewRequest]) -> dict[int, dict[str, object]]:
    """Everything that clients see, by request, whatever the steps it came in."""
    found = generations_of(*shard.run_out(shard.prefill(0, *requests), 0))
    return {request.id: _joined(found[request.id]) for request in requests}


def _joined(generations: list[Generation]) -> dict[str, object]:
    tokens = [g.tokens for g in generations if g.tokens is not None]
    tops = [t for g in generations for t in g.top_tokens]
    return {
        "ids": [i for t in tokens for i in t.ids],
        "logprobs": logprobs_of(v for t in tokens for v in t.logprobs),
        "texts": [text for t in tokens for text in t.texts],
        "special": [special for t in tokens for special in t.is_special],
        "top": [(t.ids, t.texts) for t in tops],
        "ended": generations[-1].generated_text,
        "errors": [g.error for g in generations if g.error is not None],
    }


@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
def test_a_mixed_batch_says_what_it_says_with_one_token_a_step(tiny_tokenizer: Tokenizer, wrong: float) -> None:
    """All kinds at once: penalties' histories, seeds, top tokens, grammar, stop text; and each alone."""
    plain = EngineShard(tiny_tokenizer, budget=1000)
    wanted = said(plain, mixed_requests(plain, tiny_tokenizer))
    known = {number: list(one["ids"]) for number, one in wanted.items()}  # type: ignore[call-overload]
    together = several(tiny_tokenizer, most=6, wrong=wrong, known=known)
    requests = mixed_requests(together, tiny_tokenizer)
    assert said(together, requests) == wanted
    speculator = speculator_of(together.engine)
    assert isinstance(speculator, Oracle) and speculator.num_drafted > 20
    share = speculator.num_right / speculator.num_drafted
    assert share == 1.0 if not wrong else share < 0.9
    for number in range(len(requests)):
        alone = several(tiny_tokenizer, known=known)
        request = mixed_requests(alone, tiny_tokenizer)[number]
        assert said(alone, [request]) == {request.id: wanted[request.id]}


def test_tokens_after_an_end_are_dropped(tiny_tokenizer: Tokenizer) -> None:
    plain = EngineShard(tiny_tokenizer)
    ids = plain.expected(plain.request([5, 6, 7], 12))
    stop = tiny_tokenizer.decode_one(ids[4])
    stopping = StoppingParameters(max_new_tokens=12, ignore_eos_token=True, stop_sequences=(stop,))
    shard = several(tiny_tokenizer, most=9)
    request, other = shard.request([5, 6, 7], 12, stopping=stopping), shard.request([3], 12)
    result = said(shard, [request, other])
    ended = result[request.id]["ended"]
    assert ended.finish_reason is FinishReason.STOP_SEQUENCE  # type: ignore[attr-defined]
    assert result[request.id]["ids"] == ids[: ended.generated_tokens]  # type: ignore[attr-defined]
    assert result[other.id]["ids"] == shard.expected(other)


@pytest.mark.parametrize("new_tokens", range(1, 9))
def test_a_length_limit_inside_a_step(tiny_tokenizer: Tokenizer, new_tokens: int) -> None:
    shard = several(tiny_tokenizer, most=5, seed=new_tokens)
    request = shard.request([5, 6, 7], new_tokens)
    result = said(shard, [request])[request.id]
    assert result["ids"] == shard.expected(request)
    assert result["ended"].finish_reason is FinishReason.LENGTH  # type: ignore[attr-defined]
    assert result["ended"].generated_tokens == new_tokens  # type: ignore[attr-defined]


def test_each_token_has_its_own_top_tokens(tiny_tokenizer: Tokenizer) -> None:
    shard = several(tiny_tokenizer, most=3, seed=5)
    request = shard.request([5, 6, 7], 10, top_n_tokens=2)
    results = shard.run_out(shard.prefill(0, request), 0)
    generations = generations_of(*results)[request.id]
    assert any(len(g.tokens.ids) > 1 for g in generations if g.tokens is not None)
    for generation in generations:
        assert generation.tokens is not None
        assert [t.ids[0] for t in generation.top_tokens] == generation.tokens.ids


def test_rows_join_leave_and_get_blocks_in_between(tiny_tokenizer: Tokenizer) -> None:
    shard = several(tiny_tokenizer, most=3, grows=True)
    first, second, late = (shard.request([5 + i, 6], 20) for i in range(3))
    results = [shard.prefill(0, first, second), shard.decode(0), shard.decode(0)]
    results.append(shard.prefill(1, late, cached=0))
    shard.engine.filter(0, [second.id, late.id])
    results = [*results[:-1], *shard.run_out(results[-1], 0)]
    found = tokens_of(*results)
    assert found[second.id] == shard.expected(second) and found[late.id] == shard.expected(late)
    assert found[first.id] == shard.expected(first)[: len(found[first.id])]


def test_a_row_without_slots_for_its_tokens_fails_alone(tiny_tokenizer: Tokenizer) -> None:
    shard = several(tiny_tokenizer, most=6, seed=1, grows=True)
    short, other = shard.request([1, 2, 3], 12, tokens=4), shard.request([5, 6], 12)
    generations = generations_of(*shard.run_out(shard.prefill(0, short, other), 0))
    assert "4 slots, none for" in str(generations[short.id][-1].error)
    assert [i for g in generations[other.id] if g.tokens for i in g.tokens.ids] == shard.expected(other)


def test_a_row_without_scores_fails_alone(tiny_tokenizer: Tokenizer) -> None:
    shard = several(tiny_tokenizer, most=4)
    bad, good = shard.request([9, 10], 8), shard.request([1, 2, 3], 8)
    assert isinstance(shard.runner, FakeRunner)
    shard.runner.poisoned = {shard.expected(bad)[3]} - set(shard.expected(good))
    generations = generations_of(*shard.run_out(shard.prefill(0, bad, good), 0))
    assert "not numbers" in str(generations[bad.id][-1].error)
    assert [i for g in generations[good.id] if g.tokens for i in g.tokens.ids] == shard.expected(good)


def test_no_step_is_submitted_before_such_a_step_is_collected(tiny_tokenizer: Tokenizer) -> None:
    shard = several(tiny_tokenizer, most=2)
    shard.prefill(0, shard.request([1, 2], 9, sampling=SamplingParameters()))
    collect = shard.submit_decode(0)
    running = shard.engine._store.find(0)
    assert running.needs_last_step
    collect()


@pytest.mark.parametrize("most", [1, 4])
def test_text_that_fails_on_one_rank_inside_a_step_leaves_the_ranks_in_step(
    tiny_tokenizer: Tokenizer, most: int
) -> None:
    def broken(token_id: int) -> str:
        raise ValueError("no text")

    ranks = [several(tiny_tokenizer, most=most, seed=3, rank=rank, world_size=2) for rank in range(2)]
    results = [s.prefill(0, s.request([1, 2], 9), s.request([3], 9)) for s in ranks]
    owner = ranks[0].engine._store.find(0).batch.sequences[0]
    assert owner.detokenizer is not None
    owner.detokenizer.append = broken  # type: ignore[method-assign]
    while results[0].batch is not None:
        results = [s.decode(0) for s in ranks]
        seen = [s.runner.last_inputs.input_ids.tolist() for s in ranks if s.runner.last_inputs is not None]
        assert seen[0] == seen[1]
        assert results[0].batch == results[1].batch


def test_a_request_goes_on_where_it_was_preempted(tiny_tokenizer: Tokenizer) -> None:
    sampling = SamplingParameters(do_sample=True, temperature=9.0, seed=3, repetition_penalty=2.0)
    plain = EngineShard(tiny_tokenizer, budget=1000)
    whole = said(plain, [plain.request([5, 6, 7], 12, sampling=sampling)])[0]
    shard = several(tiny_tokenizer, most=4, seed=2)
    request = shard.request([5, 6, 7], 12, sampling=sampling)
    first = tokens_of(shard.prefill(0, request), shard.decode(0))[request.id]
    shard.engine.clear(0)
    again = dataclasses.replace(request, resume_ids=tuple(first))
    rest = said(shard, [again])[again.id]
    assert [*first, *rest["ids"]] == whole["ids"] and rest["ended"] == whole["ended"]  # type: ignore[misc]
