"""An engine whose runner keeps a state per request: right tokens, and no state outlives its request."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.engine_shard import EngineShard, errors_of, tokens_of
from support.fake_model import FakeStateRunner

from model_server.runner.runner import RunnerTraits
from model_server.text.detokenizer import Detokenizer
from model_server.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def shard(tiny_tokenizer: Tokenizer) -> EngineShard:
    return EngineShard(tiny_tokenizer, runner=FakeStateRunner(vocab_size=tiny_tokenizer.vocab_size))


def kept(shard: EngineShard) -> list[weakref.ref[Any]]:
    """The states of the last forward's rows."""
    assert shard.runner.last_inputs is not None
    found = [weakref.ref(state.kept) for state in shard.runner.last_inputs.states]
    shard.runner.last_inputs = None
    return found


def alive(states: list[weakref.ref[Any]]) -> list[bool]:
    gc.collect()
    return [state() is not None for state in states]


def test_batches_that_merge_and_shrink_give_the_right_tokens(shard: EngineShard) -> None:
    a, b, c = shard.request([5, 6, 7], 6), shard.request([9, 9], 2), shard.request([4] * 9, 5)
    results = [shard.prefill(0, a, b), shard.decode(0), shard.prefill(1, c), shard.decode(0, 1)]
    results += [shard.decode(0), shard.decode(0), shard.decode(0)]
    assert tokens_of(*results) == {r.id: shard.expected(r) for r in (a, b, c)}
    assert results[-1].batch is None


def test_a_state_goes_when_its_request_ends(shard: EngineShard) -> None:
    a, b = shard.request([5, 6, 7], 6), shard.request([9, 9], 2)
    shard.prefill(0, a, b)
    states = kept(shard)
    assert alive(states) == [True, True]
    shard.decode(0)
    shard.runner.last_inputs = None
    assert alive(states) == [True, False]


def test_a_state_goes_when_its_request_is_filtered_away(shard: EngineShard) -> None:
    a, b = shard.request([5, 6, 7], 6), shard.request([9, 9], 6)
    shard.prefill(0, a, b)
    states = kept(shard)
    shard.engine.filter(0, [b.id])
    assert alive(states) == [False, True]


def test_states_go_when_the_cache_is_cleared(shard: EngineShard) -> None:
    shard.prefill(0, shard.request([5, 6, 7], 6))
    states = kept(shard)
    shard.engine.clear(None)
    assert alive(states) == [False]


def test_states_go_when_their_step_fails(shard: EngineShard) -> None:
    shard.prefill(0, shard.request([5, 6, 7], 6))
    states = kept(shard)
    shard.runner.fail_on[shard.runner.num_forwards + 1] = ValueError("boom")
    with pytest.raises(ValueError, match="boom"):
        shard.decode(0)
    shard.runner.last_inputs = None
    shard.runner.fail_on.clear()  # the error remembers the frames it went through
    assert alive(states) == [False]


def test_a_request_that_resumes_starts_from_its_beginning(shard: EngineShard) -> None:
    a = shard.request([5, 6, 7], 6)
    want = shard.expected(a)
    [first] = tokens_of(shard.prefill(0, a)).values()
    shard.engine.clear(0)
    again = shard.request([5, 6, 7], 6, resume_ids=tuple(first))
    results = [shard.prefill(1, again)] + [shard.decode(1) for _ in range(4)]
    assert first + tokens_of(*results)[again.id] == want


def test_a_prompt_that_comes_in_chunks_is_refused(shard: EngineShard) -> None:
    refused = shard.request([5, 6, 7], 3, chunk_len=2)
    assert "does not chunk" in errors_of(shard.prefill(0, refused))[refused.id]


def test_text_of_an_encoder_decoder_begins_with_its_own_tokens(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is another text: neither spaces nor penalties follow from it."""
    contexts: list[list[int]] = []

    class Recorded(Detokenizer):
        def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
            contexts.append(prompt_ids)
            super().__init__(tokenizer, prompt_ids)

    monkeypatch.setattr("model_server.engine.sequences.Detokenizer", Recorded)
    runner = FakeStateRunner(
        vocab_size=tiny_tokenizer.vocab_size, traits=RunnerTraits(state_bytes=1000, decoder_prefix=(2,))
    )
    shard = EngineShard(tiny_tokenizer, runner=runner)
    a = shard.request([5, 6, 7], 3)
    results = [shard.prefill(0, a), shard.decode(0), shard.decode(0)]
    assert tokens_of(*results) == {a.id: shard.expected(a)}
    assert contexts == [[2]]
