"""Requests that were preempted and go on: as if they had never stopped, whatever they ask for and wherever it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.engine_shard import (
    EngineShard,
    errors_of,
    generations_of,
    mixed_kinds,
    mixed_requests,
    sleeping_grammar,
    tokens_of,
)

from model_server.batch.results import FinishReason, Generation
from model_server.batch.sequence import NewRequest
from model_server.sampling.parameters import Grammar, SamplingParameters, StoppingParameters
from model_server.text.tokenizer import Tokenizer

NEW_TOKENS = 9
KINDS = [
    "greedy", "seeded", "TGI's penalties", "OpenAI's penalties", "grammar", "stop text", "watermark",
    "minimum length",
]  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def tokenizer(tiny_tokenizer: Tokenizer) -> Tokenizer:
    return tiny_tokenizer


def _run(tokenizer: Tokenizer, changes: dict[str, Any], budget: int = 1000, **more: Any) -> list[Generation]:
    """What a request says from its start, or from where `resume_ids` leave it."""
    shard = EngineShard(tokenizer, budget=budget)
    request = shard.request(list(range(5, 16)), NEW_TOKENS, **changes | more)
    return generations_of(*shard.run_out(shard.prefill(0, request), 0))[request.id]


def _changes(tokenizer: Tokenizer, kind: str) -> dict[str, Any]:
    kinds = mixed_kinds(tokenizer)
    del kinds[6]  # prompt logprobs were delivered in the first life
    changes = kinds[KINDS.index(kind)]
    if kind == "stop text":
        # Text that spans two tokens in the middle of the answer.
        del changes["stopping"]
        texts = [g.tokens.texts[0] for g in _run(tokenizer, changes) if g.tokens is not None]
        at = next(i for i in range(3, 7) if texts[i] and texts[i + 1] and "\ufffd" not in texts[i] + texts[i + 1])
        changes["stopping"] = StoppingParameters(
            max_new_tokens=NEW_TOKENS, ignore_eos_token=True,
            stop_sequences=("nothing of this kind", texts[at][-1] + texts[at + 1][0]),
        )  # fmt: skip
    return changes


def _ids(generations: list[Generation]) -> tuple[int, ...]:
    return tuple(g.tokens.ids[0] for g in generations if g.tokens is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_request_goes_on_as_it_would_have(tokenizer: Tokenizer, kind: str) -> None:
    changes = _changes(tokenizer, kind)
    whole = _run(tokenizer, changes)
    ids = _ids(whole)
    ended = whole[-1].generated_text
    assert ended is not None and len(ids) == len(whole) >= 4
    if kind == "stop text":
        assert ended.finish_reason is FinishReason.STOP_SEQUENCE and len(ids) < NEW_TOKENS
    for count in range(1, len(ids)):
        for budget, cuts in [(1000, {}), (3, {"chunk_len": 2}), (1, {"chunk_len": 11 + count})]:
            assert _run(tokenizer, changes, budget, resume_ids=ids[:count], **cuts) == whole[count:], (count, cuts)


@pytest.mark.parametrize("is_text", [False, True])
def test_a_grammar_that_sleeps_goes_on_as_it_would_have(tokenizer: Tokenizer, is_text: bool) -> None:
    """Resumed before, at and after the token that wakes it."""
    at = 3
    for seed in range(200):
        sampling = SamplingParameters(do_sample=True, seed=seed)
        free = _run(tokenizer, {"sampling": sampling})
        ids, texts = _ids(free), [g.tokens.texts[0] for g in free if g.tokens is not None]
        if texts[at].isascii() and texts[at].isalpha() and texts[at] not in "".join(texts[:at]):
            break
    else:
        raise AssertionError("no answer has a word of its own in this place")
    grammar = sleeping_grammar(texts[at] if is_text else ids[at], "/[0-9]{40}/")
    changes = {"sampling": dataclasses.replace(sampling, grammar=grammar)}
    whole = _run(tokenizer, changes)
    said = [g.tokens.texts[0] for g in whole if g.tokens is not None]
    assert _ids(whole)[: at + 1] == ids[: at + 1] and "".join(said[at + 1 :]).isdigit()
    for count in range(1, len(whole)):
        resumed = {"resume_ids": _ids(whole)[:count], "chunk_len": 2}
        assert _run(tokenizer, changes, 3, **resumed) == whole[count:], count


@pytest.mark.parametrize("cached", [4, 8, 12, 16])
def test_what_is_cached_counts_generated_tokens_too(tokenizer: Tokenizer, cached: int) -> None:
    shard = EngineShard(tokenizer, budget=4)
    first = shard.request(list(range(5, 16)), NEW_TOKENS)
    ids = tokens_of(*shard.run_out(shard.prefill(0, first), 0))[first.id]
    again = dataclasses.replace(first, id=77, resume_ids=tuple(ids[:6]), cache_len=cached)
    shard.prompts[77] = shard.prompts[first.id]
    result = shard.prefill(1, again)
    assert shard.query_lengths() == (17 - cached,)
    assert tokens_of(*shard.run_out(result, 1)) == {77: ids[6:]}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_preempting_the_youngest_again_and_again_changes_nothing(tokenizer: Tokenizer, every: int) -> None:
    """All kinds in one batch; every few steps the youngest is thrown out and joins again."""
    whole = EngineShard(tokenizer, budget=6)
    expected = generations_of(*whole.run_out(whole.prefill(0, *mixed_requests(whole, tokenizer)), 0))
    shard = EngineShard(tokenizer, budget=6)
    requests: dict[int, NewRequest] = {r.id: r for r in mixed_requests(shard, tokenizer)}
    found: dict[int, list[Generation]] = {i: [] for i in requests}
    results = [shard.prefill(0, *requests.values())]
    for step in range(400):
        for request_id, said in generations_of(results[-1]).items():
            found[request_id].extend(said)
        batch = results[-1].batch
        if batch is None:
            break
        # Whoever delivered prompt logprobs keeps its place: these belong to a first life alone.
        young = [i for i in batch.request_ids[1:] if not requests[i].prefill_logprobs]
        if young and step < 40 and step % every == 0:
            victim = young[-1]
            shard.engine.filter(0, [i for i in batch.request_ids if i != victim])
            again = dataclasses.replace(requests[victim], resume_ids=_ids(found[victim]), chunk_len=3)
            results.append(shard.prefill(step + 1, again, cached=0))
        else:
            results.append(shard.decode(0))
    assert {i: [repr(g) for g in said] for i, said in found.items()} == {
        i: [repr(g) for g in said] for i, said in expected.items()
    }


def test_ranks_resume_alike(tokenizer: Tokenizer) -> None:
    ids = _ids(_run(tokenizer, {}))
    results = []
    for rank in range(2):
        shard = EngineShard(tokenizer, rank=rank, world_size=2, budget=4)
        request = shard.request(list(range(5, 16)), NEW_TOKENS, resume_ids=ids[:4], chunk_len=3)
        results.append(shard.run_out(shard.prefill(0, request), 0))
    assert [r.batch for r in results[0]] == [r.batch for r in results[1]]
    assert _ids([g for r in results[0] for g in r.generations]) == ids[4:]
    assert not any(r.generations for r in results[1])


@pytest.mark.parametrize(
    ("changes", "resumed", "message"),
    [
        ({}, NEW_TOKENS, "nothing is left to generate"),
        ({"stopping": StoppingParameters(max_new_tokens=NEW_TOKENS, stop_sequences=("",))}, 10**6, "is outside"),
        ({"sampling": SamplingParameters(grammar=Grammar("regex", "[0-9]+"))}, 1, "the grammar failed"),
        ({"prefill_logprobs": True}, 1, "prompt logprobs were delivered"),
    ],
)
def test_what_cannot_be_resumed(tokenizer: Tokenizer, changes: dict[str, Any], resumed: int, message: str) -> None:
    shard = EngineShard(tokenizer)
    resume_ids = (10**6,) if resumed == 10**6 else (40,) * resumed
    bad = shard.request([5, 6], NEW_TOKENS, resume_ids=resume_ids, **changes)
    good = shard.request([7, 8], 3)
    result = shard.prefill(0, bad, good)
    assert message in errors_of(result)[bad.id]
    assert result.batch is not None and result.batch.request_ids == [good.id]
