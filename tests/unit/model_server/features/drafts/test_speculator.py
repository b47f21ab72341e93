"""Windows on the real engine: positions and slots, drafts that do not pay, and every kind of request beside others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.drafts import drafts_in, speculator_of, use_drafts
from support.engine_shard import BLOCK, EngineShard, generations_of, mixed_requests, slots_of, tokens_of
from support.fake_model import FakeRunner, greedy

from model_server.distributed.group import ProcessGroup
from model_server.engine.engine import Engine
from model_server.features.drafts.costs import step_costs
from model_server.features.drafts.pace import Pace
from model_server.features.drafts.report import Drafted
from model_server.features.drafts.speculator import Speculator
from model_server.sampling.parameters import Grammar, SamplingParameters
from model_server.text.tokenizer import Tokenizer
from wire.step_phases import DraftKind

FREE = Pace([(1, 1.0)])
DEAR = Pace([(1, 1.0), (2, 2.0)])


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def speculating(tokenizer: Tokenizer, most: int, pace: Pace = FREE, **options: object) -> EngineShard:
    shard = EngineShard(tokenizer, budget=1000, **options)  # type: ignore[arg-type]
    speculator = Speculator(most)
    speculator.pace = pace
    use_drafts(shard.engine, speculator)
    return shard


def drafting(shard: EngineShard, guesses: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft these tokens at these lengths of a history."""
    speculator = speculator_of(shard.engine)
    assert speculator is not None

    def window(rows, compute=None):  # type: ignore[no-untyped-def]
        from model_server.features.drafts.window import Window

        drafts = [guesses.get(len(s.ids), [])[: speculator.longest(s)] for s in rows]
        return Window(rows, drafts) if any(drafts) else None

    monkeypatch.setattr(speculator, "window", window)


def test_places_of_a_window(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = speculating(tiny_tokenizer, 2)
    request = shard.request([10, 11, 12], 6)
    ids = shard.expected(request)
    drafting(shard, {4: [ids[1], 99], 6: [ids[3], ids[4]]}, monkeypatch)
    results = [shard.prefill(0, request), shard.decode(0)]
    runner = shard.runner
    assert isinstance(runner, FakeRunner) and runner.last_inputs is not None
    inputs = runner.last_inputs
    assert inputs.input_ids.tolist() == [ids[0], ids[1], 99]
    assert inputs.positions.tolist() == [3, 4, 5]
    assert inputs.attention.slots.tolist() == slots_of(request.blocks)[3:6]
    assert inputs.attention.kv_lengths.tolist() == [4, 5, 6] and inputs.attention.is_decode
    assert inputs.attention.block_tables.tolist() == [inputs.attention.block_tables[0].tolist()] * 3
    results.append(shard.decode(0))
    assert runner.last_inputs.input_ids.tolist() == ids[2:5]
    assert [len(tokens_of(one)[request.id]) for one in results] == [1, 2, 3]
    assert results[-1].batch is None
    assert tokens_of(*results)[request.id] == ids


def test_drafts_are_cut_to_the_slots_and_tokens_that_are_left(tiny_tokenizer: Tokenizer) -> None:
    shard = speculating(tiny_tokenizer, 15)
    request = shard.request([7], 5)
    shard.prefill(0, request)
    (sequence,) = shard.engine._store.find(0).batch.sequences
    speculator = speculator_of(shard.engine)
    assert speculator is not None and speculator.longest(sequence) == 3
    sequence.slots = sequence.slots[:2]
    assert speculator.longest(sequence) == 0


def test_drafts_that_do_not_pay_are_not_checked(tiny_tokenizer: Tokenizer) -> None:
    shard = speculating(tiny_tokenizer, 5, DEAR)
    request = shard.request([1, 2, 3] * 5, 12)
    results = shard.run_out(shard.prefill(0, request), 0)
    assert tokens_of(*results)[request.id] == shard.expected(request)
    assert len(results) == 12
    assert {one.num_tokens for one in drafts_in(results[1:])} == {0}


@pytest.mark.parametrize(("num_rows", "searches"), [(1, 12), (9, 12), (10, 6), (32, 3)])
def test_many_rows_are_searched_for_now_and_then_where_nothing_pays(
    num_rows: int, searches: int, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = speculating(tiny_tokenizer, 5, DEAR, num_blocks=200)
    speculator = speculator_of(shard.engine)
    assert speculator is not None
    asked: list[int] = []
    search = speculator._drafts
    monkeypatch.setattr(speculator, "_drafts", lambda rows, *rest: (asked.append(len(rows)), search(rows, *rest))[1])
    requests = [shard.request([1, 2, 3, 1 + i], 13) for i in range(num_rows)]
    results = shard.run_out(shard.prefill(0, *requests), 0)
    assert tokens_of(*results) == {one.id: shard.expected(one) for one in requests}
    assert asked == [num_rows] * searches


def test_each_kind_of_request_says_what_it_says_without_drafts(tiny_tokenizer: Tokenizer) -> None:
    plain = EngineShard(tiny_tokenizer, budget=1000)
    requests = mixed_requests(plain, tiny_tokenizer)
    wanted = generations_of(*plain.run_out(plain.prefill(0, *requests), 0))
    shard = speculating(tiny_tokenizer, 5)
    results = shard.run_out(shard.prefill(0, *mixed_requests(shard, tiny_tokenizer)), 0)
    found = generations_of(*results)
    for request in requests:
        for one in (wanted, found):
            ids = [i for g in one[request.id] if g.tokens is not None for i in g.tokens.ids]
            one[request.id] = [ids, one[request.id][-1].generated_text]  # type: ignore[assignment]
    assert found == wanted
    assert sum(one.num_tokens for one in drafts_in(results)) > 0


def test_text_that_a_grammar_forces_takes_fewer_steps_than_tokens(tiny_tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", "the only text that fits here( and| or) nothing else at all")
    counts = []
    for most in (0, 8):
        shard = speculating(tiny_tokenizer, most)
        request = shard.request([1, 2], 90, sampling=SamplingParameters(grammar=grammar))
        results = shard.run_out(shard.prefill(0, request), 0)
        counts.append((len(results), tokens_of(*results)[request.id]))
    assert counts[0][1] == counts[1][1]
    assert counts[1][0] < 0.5 * counts[0][0]
    right = [one.right for one in drafts_in(results)]
    assert sum(one[DraftKind.GRAMMAR] for one in right) > 10 and not any(one[DraftKind.MODEL] for one in right)


def test_what_a_grammar_forces_says_nothing_of_other_guesses(tiny_tokenizer: Tokenizer) -> None:
    shard = speculating(tiny_tokenizer, 8)
    forced = SamplingParameters(grammar=Grammar("regex", "the only text that fits here and nothing else at all"))
    request = shard.request([1, 2], 90, sampling=forced)
    results = [shard.prefill(0, request)]
    speculator = speculator_of(shard.engine)
    assert speculator is not None
    while results[-1].batch is not None:
        results.append(shard.decode(0))
        assert speculator.drafting[request.id].acceptance.share == 0.5
    right = [one.right for one in drafts_in(results)]
    assert sum(one[DraftKind.GRAMMAR] for one in right) > 10


def test_two_ranks_draft_the_same(tiny_tokenizer: Tokenizer) -> None:
    ranks = [speculating(tiny_tokenizer, 5, rank=rank, world_size=2) for rank in range(2)]
    results = [s.prefill(0, s.request([1, 2] * 4, 20), s.request([3, 4, 5] * 3, 20)) for s in ranks]
    while results[0].batch is not None:
        results = [s.decode(0) for s in ranks]
        seen = [s.runner.last_inputs.input_ids.tolist() for s in ranks if s.runner.last_inputs is not None]
        assert seen[0] == seen[1] and results[0].batch == results[1].batch


def test_rows_get_several_tokens_of_a_step_beside_chunks_of_a_prompt(tiny_tokenizer: Tokenizer) -> None:
    shard = speculating(tiny_tokenizer, 5)
    shapes = {(1, 2, 3): (30, None), (4, 5, 6, 7, 8, 9): (9, 2), (3, 8): (17, None)}
    requests = [
        shard.request(list(prompt), new, chunk_len=chunk,
                      prediction_ids=tuple(greedy(list(prompt), new, shard.runner.vocab_size)))
        for prompt, (new, chunk) in shapes.items()
    ]  # fmt: skip
    results = shard.run_out(shard.prefill(0, *requests), 0)
    assert tokens_of(*results) == {one.id: shard.expected(one) for one in requests}
    assert len(results) < 15


def test_costs_rise_with_the_rows(tiny_tokenizer: Tokenizer) -> None:
    engine: Engine = EngineShard(tiny_tokenizer).engine
    for rows in engine.cache.rows:
        rows.zero_()
    costs = step_costs(engine.runner, engine.cache, ProcessGroup())
    assert [rows for rows, _ in costs] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert all(seconds > 0 for _, seconds in costs)
    assert BLOCK * engine.cache.num_blocks < 256 * 128, "and the rows share blocks where there are few"


def assert_counted_for_the_request(drafted: list[Drafted], request_id: int) -> None:
    """Each step says what became of the request's prediction if it checked some of it, and nothing else."""
    for one in drafted:
        num_tokens, right = one.tokens[DraftKind.PREDICTION], one.right[DraftKind.PREDICTION]
        assert one.predicted == ({request_id: (right, num_tokens - right)} if num_tokens else {})


def test_predictions_are_counted_for_each_request(tiny_tokenizer: Tokenizer) -> None:
    """Beside requests without one, and where a part of it is wrong."""
    shard = speculating(tiny_tokenizer, 4)
    asked = [shard.request([1, 2, 3], 20), shard.request([4, 5, 6], 20), shard.request([7, 8], 20)]
    answers = [shard.expected(one) for one in asked]
    wrong = [id if place % 4 else 9 for place, id in enumerate(answers[1])]
    asked = [
        shard.request([1, 2, 3], 20, prediction_ids=tuple(answers[0])),
        shard.request([4, 5, 6], 20, prediction_ids=tuple(wrong)),
        shard.request([7, 8], 20),
    ]
    results = shard.run_out(shard.prefill(0, *asked), 0)
    drafted = drafts_in(results)
    found = {one.id: [step.predicted[one.id] for step in drafted if one.id in step.predicted] for one in asked}
    accepted, rejected = ([sum(step[part] for step in found[one.id]) for one in asked] for part in (0, 1))
    assert accepted[0] >= 10 and not rejected[0]
    assert 0 < accepted[1] < accepted[0] and rejected[1]
    assert not found[asked[2].id]
    assert sum(accepted) == sum(one.right[DraftKind.PREDICTION] for one in drafted)
    assert sum(accepted) + sum(rejected) == sum(one.tokens[DraftKind.PREDICTION] for one in drafted)


def test_a_prediction_is_what_is_drafted_and_changes_nothing(tiny_tokenizer: Tokenizer) -> None:
    plain = EngineShard(tiny_tokenizer, budget=1000)
    wanted = plain.expected(plain.request([1, 2, 3], 20))
    for prediction, fewer in ((wanted, True), (wanted[4:], True), ([9] * 20, False)):
        shard = speculating(tiny_tokenizer, 5)
        request = shard.request([1, 2, 3], 20, prediction_ids=tuple(prediction))
        results = shard.run_out(shard.prefill(0, request), 0)
        assert tokens_of(*results)[request.id] == wanted
        drafted = drafts_in(results)
        right = sum(one.right[DraftKind.PREDICTION] for one in drafted)
        assert right >= 10 if fewer else not right
        assert_counted_for_the_request(drafted, request.id)
    results = shard.run_out(shard.prefill(0, shard.request([1, 2], 4, prediction_ids=(10**6,))), 0)
    assert "outside the model's" in str(generations_of(*results))
