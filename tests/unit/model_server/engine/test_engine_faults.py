"""A bug in the work for one row, wherever and whenever it shows: that request fails, and no other one notices."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engine_shard import EngineShard, generations_of, tokens_of
from support.fake_model import FakeRunner

from model_server.batch.sequence import Sequence
from model_server.errors import BatchGoneError, OutOfMemoryError
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import ModelInputs
from model_server.sampling.parameters import Grammar, SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampled
from model_server.text.tokenizer import Tokenizer

STEPS = 8


def _broken(*arguments: Any, **options: Any) -> Any:
    raise KeyError("a bug")


def _stop_check(sequence: Sequence) -> None:
    sequence.stopping.check = _broken  # type: ignore[method-assign]


def _text(sequence: Sequence) -> None:
    assert sequence.detokenizer is not None
    sequence.detokenizer.append = _broken  # type: ignore[method-assign]


def _final_text(sequence: Sequence) -> None:
    assert sequence.detokenizer is not None
    sequence.detokenizer.final_text = _broken  # type: ignore[method-assign]


def _cut(sequence: Sequence) -> None:
    sequence.stopping.cut = _broken  # type: ignore[method-assign]


def _grammar(sequence: Sequence) -> None:
    assert sequence.row.grammar is not None
    sequence.row.grammar.advance = _broken  # type: ignore[method-assign]


@pytest.mark.parametrize("hook", [_stop_check, _text, _final_text, _cut, _grammar])
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("budget", [None, 16])
def test_only_the_request_at_fault_fails(
    tiny_tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    hook: Callable[[Sequence], None],
    step: int,
    budget: int | None,
) -> None:
    with torch.inference_mode():
        shard = EngineShard(tiny_tokenizer, budget=budget)
        grammar = SamplingParameters(grammar=Grammar("regex", "[0-9]{20}"))
        stopping = StoppingParameters(max_new_tokens=STEPS, ignore_eos_token=True, stop_sequences=("\n\n\n",))
        before, after = shard.request([1, 2], STEPS), shard.request([7, 8, 9], STEPS)
        faulty = shard.request([5, 6], STEPS, sampling=grammar, stopping=stopping)
        results = [shard.prefill(0, before, faulty, after)]
        results += [shard.decode(0) for _ in range(step)]
        batch = shard.engine._store.find(0).batch
        hook(next(sequence for sequence in batch.sequences if sequence.id == faulty.id))
        while results[-1].batch is not None:
            results.append(shard.decode(0))
        said = generations_of(*results)
        errors = [generation.error for generation in said.pop(faulty.id) if generation.error is not None]
        assert errors == ["the model server failed; its log says why"]
        assert caplog.text.count("KeyError: 'a bug'") == 1
        got = {id_: [i for g in generations for i in g.tokens.ids] for id_, generations in said.items() if generations}
        assert got == {request.id: shard.expected(request) for request in (before, after)}
        again = shard.request([1, 2], STEPS)
        assert tokens_of(*shard.run_out(shard.prefill(1, again), 1)) == {again.id: shard.expected(again)}


def test_top_tokens_that_have_no_text(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        shard = EngineShard(tiny_tokenizer)
        plain, faulty = shard.request([1, 2], STEPS), shard.request([3], STEPS, top_n_tokens=2)
        first = shard.prefill(0, plain, faulty)
        monkeypatch.setattr(shard.engine.steps.answers, "_top_tokens", _broken)
        said = generations_of(*shard.run_out(first, 0))
        assert said[faulty.id][-1].error is not None
        assert [i for g in said[plain.id] if g.tokens for i in g.tokens.ids] == shard.expected(plain)


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("no memory"), MemoryError("an operator's scratch")])
def test_a_batch_without_memory_ends_alone_and_its_tensors_go(tiny_tokenizer: Tokenizer, fault: Exception) -> None:
    """Even while somebody still holds the error, whose frames held the step's tensors."""
    taken: list[weakref.ref[torch.Tensor]] = []

    class Hungry(FakeRunner):
        def forward(self, inputs: ModelInputs, cache: KvCache) -> torch.Tensor:
            activations = torch.zeros(3)
            if self.num_forwards == 2:
                taken.append(weakref.ref(activations))
                raise fault
            return super().forward(inputs, cache)

    shard = EngineShard(tiny_tokenizer, runner=Hungry(vocab_size=tiny_tokenizer.vocab_size))
    with torch.inference_mode():
        shard.prefill(0, shard.request([5, 6], 5))
        shard.decode(0)
        with pytest.raises(OutOfMemoryError) as raised:
            shard.decode(0)
        assert raised.value.__cause__ is not None and taken[0]() is None
        with pytest.raises(BatchGoneError):
            shard.decode(0)
        shard.runner.num_forwards = 3
        other = shard.request([7, 8], 5)
        assert tokens_of(*shard.run_out(shard.prefill(1, other), 1))[other.id] == shard.expected(other)


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("no memory"), RuntimeError("bug")])
def test_a_step_is_answered_though_the_one_after_it_could_not_be_submitted(
    tiny_tokenizer: Tokenizer, fault: Exception
) -> None:
    runner = FakeRunner(vocab_size=tiny_tokenizer.vocab_size, fail_on={4: fault})
    shard = EngineShard(tiny_tokenizer, runner=runner)
    with torch.inference_mode():
        short, long = shard.request([5, 6], 3), shard.request([7], 9)
        results = [shard.prefill(0, short, long), shard.decode(0)]
        last_of_short = shard.submit_decode(0)
        with pytest.raises((OutOfMemoryError, RuntimeError), match=r"out of memory|bug"):
            shard.decode(0)
        results.append(last_of_short())
        assert tokens_of(*results) == {short.id: shard.expected(short), long.id: shard.expected(long)[:3]}
        with pytest.raises(BatchGoneError):
            shard.decode(0)


def test_a_step_after_one_that_failed_is_not_answered(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = EngineShard(tiny_tokenizer)
    with torch.inference_mode():
        shard.prefill(0, shard.request([5, 6], 9))
        first, second = (shard.submit_decode(0) for _ in range(2))
        with monkeypatch.context() as faulty, pytest.raises(KeyError):
            faulty.setattr(Sampled, "to_host", _broken)
            first()
        with pytest.raises(BatchGoneError):
            second()
