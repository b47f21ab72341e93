"""Grammar rows in the engine: beside others, failing alone, masked while the device computes the forward."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.fake_model import FakeRunner, greedy
from support.tiny_models import write_tokenizer

from model_server.batch.results import FinishReason, Generation
from model_server.batch.sequence import NewRequest
from model_server.distributed.layout import Layout
from model_server.engine.calls import DecodeCall, PrefillCall
from model_server.engine.engine import Engine, EngineOptions
from model_server.memory.kv_cache import KvCache
from model_server.sampling.grammars import cost
from model_server.sampling.parameters import Grammar, SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampled, Sampler
from model_server.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
BLOCK = 4
EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return Tokenizer.load(folder)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Iterator[Engine]:
    with torch.inference_mode():
        yield make_engine(tokenizer)


def make_engine(tokenizer: Tokenizer, world_size: int = 1) -> Engine:
    """Rank 0 of `world_size`."""
    runner = FakeRunner(vocab_size=tokenizer.vocab_size)
    options = EngineOptions(
        device=CPU, layout=Layout.of(0, world_size), block_size=BLOCK, prompt_logprobs_allowed=False
    )
    made = Engine(runner, tokenizer, Sampler(runner.vocab_size, CPU), options)
    made.set_cache(KvCache(runner.kv_shapes, 64, BLOCK, torch.float32, CPU))
    return made


def request(number: int, regex: str | None, new_tokens: int = 12, **stopping: Any) -> NewRequest:
    return NewRequest(
        id=number,
        input_ids=(5, 6 + number),
        sampling=SamplingParameters(grammar=Grammar("regex", regex) if regex else None),
        stopping=StoppingParameters(max_new_tokens=new_tokens, **stopping),
        prefill_logprobs=False,
        top_n_tokens=0,
        blocks=np.arange(1 + 4 * number, 5 + 4 * number, dtype=np.int32),
        cache_len=0,
        chunk_len=None,
    )


def run(engine: Engine, requests: list[NewRequest]) -> dict[int, list[Generation]]:
    engine.compile_grammars(requests)
    result = engine.submit_prefill(PrefillCall(batch_id=0, sequence=0), requests)()
    step = DecodeCall(batch_ids=(0,), sequence=0)
    found: dict[int, list[Generation]] = {}
    while True:
        for generation in result.generations:
            found.setdefault(generation.request_id, []).append(generation)
        if result.batch is None:
            return found
        assert not engine.may_overlap(step)
        result = engine.submit_decode(step)()


def ids(generations: list[Generation]) -> list[int]:
    return [one.tokens.ids[0] for one in generations if one.tokens is not None]


def test_a_mixed_batch(engine: Engine, tokenizer: Tokenizer) -> None:
    pattern = "[0-9]{3}-[A-F]{2}"
    plain = [request(0, None, ignore_eos_token=True), request(2, None, ignore_eos_token=True)]
    found = run(engine, [plain[0], request(1, pattern), plain[1]])
    for one in plain:
        assert ids(found[one.id]) == greedy([5, 6 + one.id], 12, tokenizer.vocab_size)
    ended = found[1][-1].generated_text
    assert ended is not None and ended.finish_reason is FinishReason.EOS_TOKEN
    assert re.fullmatch(pattern, ended.text)
    assert ids(found[1])[-1] == EOS


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_token_ends_it_even_if_it_is_to_be_ignored(engine: Engine, ignored: bool) -> None:
    (ended,) = [one.generated_text for one in run(engine, [request(0, "ab", ignore_eos_token=ignored)])[0][-1:]]
    assert ended is not None and (ended.text, ended.finish_reason) == ("ab", FinishReason.EOS_TOKEN)


def test_a_grammar_that_fails_on_the_way_fails_its_request_alone(engine: Engine) -> None:
    found = run(engine, [request(0, None, ignore_eos_token=True), request(1, "a{4294967295}"), request(2, "ab")])
    assert "the grammar failed" in (found[1][-1].error or "") and found[1][-1].grammar_at_fault
    assert len(found[0]) == 12 and found[2][-1].generated_text is not None


def test_a_grammar_that_others_crowd_out_is_not_at_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MOST_LEFT_BEHIND", 0)
    lark = json.dumps({"grammars": [{"lark_grammar": "start: @x"}, {"name": "x", "lark_grammar": "start: /[ab]+/"}]})
    asked = replace(request(1, None), sampling=SamplingParameters(grammar=Grammar("lark", lark)))
    (failed,) = run(engine, [request(0, None, ignore_eos_token=True), asked])[1]
    assert failed.error is not None and failed.error.startswith("the server still works on grammars of other requests")
    assert failed.overloaded and not failed.grammar_at_fault


def test_a_grammar_that_does_not_compile_fails_its_request_alone(engine: Engine) -> None:
    found = run(engine, [request(0, "a("), request(1, "ab")])
    told = "grammar is not valid: it is malformed, or too large for this model's vocabulary"
    assert found[0][0].error == told and found[0][0].grammar_at_fault
    assert found[1][-1].generated_text is not None and found[1][-1].generated_text.text == "ab"


@pytest.mark.parametrize("regex", ["[0-9]{3}-[A-F]{2}", None])
def test_a_mask_is_made_while_the_device_computes_the_forward(
    engine: Engine, tokenizer: Tokenizer, regex: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is submitted before the one before it is collected, and says what it says in turn."""
    requests = [request(0, None, ignore_eos_token=True), request(1, regex, ignore_eos_token=regex is None)]
    expected = run(make_engine(tokenizer), requests)
    order: list[str] = []
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    monkeypatch.setattr(Sampled, "to_host", noting(order, "seen", Sampled.to_host))
    monkeypatch.setattr(FakeRunner, "forward", noting(order, "forward", FakeRunner.forward))
    collects = [engine.submit_prefill(PrefillCall(batch_id=0, sequence=0), requests)]
    found: dict[int, list[Generation]] = {}
    for number in itertools.count(1):
        call = DecodeCall(batch_ids=(0,), sequence=number, unanswered=1)
        assert engine.may_overlap(call)
        collects.append(engine.submit_decode(call))
        result = collects.pop(0)()
        for generation in result.generations:
            found.setdefault(generation.request_id, []).append(generation)
        if result.batch is None:
            break
    assert {number: ids(said) for number, said in found.items()} == {n: ids(said) for n, said in expected.items()}
    assert order[:5] == ["forward", "forward", "seen", "forward", "seen"]


def noting(order: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        order.append(name)
        return function(*arguments)

    return noted


def test_a_rank_that_does_not_answer_for_a_request_ends_it_too(tokenizer: Tokenizer) -> None:
    with torch.inference_mode():
        found = run(make_engine(tokenizer, 2), [request(0, "ab"), request(1, "a{4294967295}"), request(3, "ab")])
    assert list(found) == [0], "and the batch has come to its end"
