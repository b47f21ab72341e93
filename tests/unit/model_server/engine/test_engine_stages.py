"""The real scheduler and the real engines of two, three and four stages: the tokens are those of one stage."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.effort import examples
from support.factories import make_request
from support.fake_model import greedy
from support.scheduler_harness import collect
from support.staged_scheduler import staged_scheduler

from model_server.engine.engine import Engine
from model_server.text.tokenizer import Tokenizer
from router.events import Event, Failed, Finished, TokenGenerated
from router.request import SamplingParameters, StoppingParameters, ValidRequest
from router.scheduling import batches, growth
from router.scheduling.queue import request_queue

NUM_REQUESTS = 12


def random_request(dice: random.Random, number: int) -> ValidRequest:
    # Some prompts begin alike, so that they share blocks.
    prompt = [dice.choice([3, 5])] * dice.choice([0, 6]) + [dice.randrange(60) for _ in range(dice.randint(1, 20))]
    sampling = SamplingParameters()
    if dice.random() < 0.5:
        sampling = SamplingParameters(do_sample=True, temperature=9.0, seed=number, presence_penalty=1.0)
    stopping = StoppingParameters(
        max_new_tokens=dice.randint(1, 20),
        ignore_eos_token=True,
        stop_token_ids=tuple(dice.randrange(60) for _ in range(dice.choice([0, 0, 2]))),
    )
    return make_request(
        f"r{number}", len(prompt), input_ids=tuple(prompt), truncate=100, sampling=sampling, stopping=stopping
    )


def ids_of(events: list[Event]) -> list[int]:
    return [event.token.id for event in events if isinstance(event, TokenGenerated | Finished)]


async def said(tokenizer: Tokenizer, num_stages: int, seed: int, *, graphs: bool) -> list[list[int]]:
    """The tokens of each request; none of those whose clients disconnected."""
    dice, late = random.Random(seed), random.Random(seed + num_stages)
    requests = [random_request(dice, number) for number in range(NUM_REQUESTS)]
    closed = set(dice.sample(range(NUM_REQUESTS), 2))
    async with staged_scheduler(tokenizer, num_stages, late, graphs=graphs, max_batch_total_tokens=64) as h:
        entries = []
        for number, request in enumerate(requests):
            entries.append(h.scheduler.submit(request))
            if late.random() < 0.5:
                await asyncio.sleep(late.choice([0, 2e-3, 5e-3]))
            if number in closed:
                entries[-1].close()
        told = [await collect(entry) if number not in closed else [] for number, entry in enumerate(entries)]
    assert not any(isinstance(events[-1], Failed) for events in told if events)
    return [ids_of(events) for events in told]


@pytest.fixture
def scarce_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come to need more blocks than they are given at first. Micro-batches are full at once, so that there is
    one more than stages."""
    monkeypatch.setattr(request_queue, "RESERVED_NEW_TOKENS", 3)
    monkeypatch.setattr(growth, "_STEP_TOKENS", 2)
    monkeypatch.setattr(batches, "FULL_ROWS", 1)


@pytest.mark.random
@pytest.mark.usefixtures("scarce_blocks")
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_any_number_of_stages_gives_the_tokens_of_one(
    tiny_tokenizer: Tokenizer, num_stages: int, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests join, share blocks, come in chunks, are preempted and lose their clients. On a GPU each stage replays
    its decode steps."""
    monkeypatch.setattr(Engine, "_runs_ahead", gpu)
    for seed in range(examples(1, 3)):
        alone = asyncio.run(said(tiny_tokenizer, 1, seed, graphs=False))
        assert asyncio.run(said(tiny_tokenizer, num_stages, seed, graphs=gpu)) == alone, seed
        assert any(alone)


@pytest.mark.usefixtures("scarce_blocks")
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_preempted_requests_get_the_models_tokens(tiny_tokenizer: Tokenizer, num_stages: int) -> None:
    """Not all requests fit at once."""
    prompts = [[first, *range(15)] for first in range(4)]
    stopping = StoppingParameters(max_new_tokens=40, ignore_eos_token=True)

    async def run() -> tuple[list[list[int]], int]:
        async with staged_scheduler(tiny_tokenizer, num_stages, random.Random(0), max_batch_total_tokens=80) as h:
            asked = [
                make_request(f"r{number}", 16, input_ids=tuple(prompt), truncate=100, stopping=stopping)
                for number, prompt in enumerate(prompts)
            ]
            entries = [h.scheduler.submit(request) for request in asked]
            told = [ids_of(await collect(entry)) for entry in entries]
            return told, sum(entry.num_preemptions for entry in entries)

    told, num_preemptions = asyncio.run(run())
    assert told == [greedy(prompt, 40, tiny_tokenizer.vocab_size) for prompt in prompts]
    assert num_preemptions > 0
