"""A real shard under the real scheduler: chunks, cached prefixes, growth and preemption never change a token."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from support.factories import RecordingMetrics, make_limits, make_request
from support.shard_process import ShardProcess
from support.tiny_models import VOCAB_SIZE, tiny_checkpoint

from router.events import Finished, TokenGenerated
from router.request import SamplingParameters, StoppingParameters, ValidRequest
from router.scheduling import growth
from router.scheduling.entry import Entry
from router.scheduling.loop import Scheduler
from router.scheduling.queue import request_queue
from router.shards.pool import ShardPool
from router.shards.warm_up import WarmUpPlan

pytestmark = pytest.mark.e2e

CAPACITY = 64 * 16


@pytest.fixture(
    scope="module",
    params=[(), pytest.param(("--kv-cache-dtype", "fp8_e4m3fn"), marks=pytest.mark.long)],
    ids=["float32", "fp8"],
)
def socket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A shard, with its cache in the model's type and in float8."""
    model = tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))
    process = ShardProcess(model, tmp_path_factory.mktemp("socket") / "s", 0, 1, 0, *request.param)
    try:
        process.wait_ready()
        yield str(process.socket)
    finally:
        process.stop()


@pytest.fixture(autouse=True)
def _small_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "RESERVED_NEW_TOKENS", 8)
    monkeypatch.setattr(growth, "_STEP_TOKENS", 16)


@asynccontextmanager
async def scheduler(socket: str, *, clever: bool, tokens: int, chunk: int) -> AsyncIterator[Scheduler]:
    """clever: with prefix cache, chunks and blocks in place; otherwise nothing but one request after the other."""
    pool = await ShardPool.discover(socket)
    try:
        await pool.clear_all()
        info = await pool.info()
        assert info.chunks and info.shares_prefixes and info.grows
        if not clever:
            info = dataclasses.replace(info, shares_prefixes=False, chunks=False)
        plan = WarmUpPlan(max_input_tokens=None, max_prefill_tokens=chunk, max_total_tokens=None, max_batch_size=None)
        await pool.warm_up(plan)
        limits = make_limits(max_batch_total_tokens=tokens, max_batch_prefill_tokens=chunk, waiting_served_ratio=0.0)
        running = Scheduler(pool, info, limits, RecordingMetrics())
        task = asyncio.create_task(running.run())
        yield running
        await running.drain()
        await task
        assert running.failure is None
        assert running.allocator is not None and running.allocator.num_free == running.allocator.num_usable
    finally:
        await pool.close()


def random_requests(seed: int, count: int) -> list[ValidRequest]:
    """Prompts that begin like earlier ones more often than not; greedy and seeded, with penalties and stop texts."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[rng.randrange(4, VOCAB_SIZE) for _ in range(40)]]
    requests = []
    for i in range(count):
        beginning = rng.choice(prompts)
        prompt = beginning[: rng.randrange(0, min(len(beginning), 60) + 1)]
        prompt = prompt + [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))]
        prompts.append(prompt)
        sampling = SamplingParameters(
            do_sample=i % 3 == 1,
            seed=i,
            repetition_penalty=1.3 if i % 4 == 2 else 1.0,
            presence_penalty=0.7 if i % 4 == 3 else 0.0,
        )
        new_tokens = rng.randrange(1, 90)
        stopping = StoppingParameters(max_new_tokens=new_tokens, stop_sequences=("e",) if i % 5 == 4 else ())
        requests.append(
            make_request(
                f"r{i}",
                len(prompt),
                input_ids=tuple(prompt),
                truncate=4096,
                sampling=sampling,
                stopping=stopping,
                decoder_input_details=i % 7 == 6,
            )
        )
    return requests


async def answer(entry: Entry) -> tuple[list[int], str]:
    ids: list[int] = []
    while True:
        event = await asyncio.wait_for(entry.next_event(), 60)
        if isinstance(event, TokenGenerated | Finished):
            ids.append(event.token.id)
        if isinstance(event, Finished):
            return ids, event.text
        assert isinstance(event, TokenGenerated), event


async def alone(socket: str, requests: list[ValidRequest]) -> list[tuple[list[int], str]]:
    async with scheduler(socket, clever=False, tokens=CAPACITY, chunk=1024) as plain:
        return [await answer(plain.submit(dataclasses.replace(r, decoder_input_details=False))) for r in requests]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_cached_and_uncached_runs_give_the_same_tokens(socket: str, seed: int) -> None:
    requests = random_requests(seed, 16)
    expected = await alone(socket, requests)
    rng = random.Random(seed)
    # Blocks for two or three of them: prefixes are evicted, requests are preempted.
    async with scheduler(socket, clever=True, tokens=17 * 16, chunk=32) as clever:
        entries: list[Entry | None] = []
        readers = []
        for request in requests:
            entry = clever.submit(dataclasses.replace(request, decoder_input_details=False))
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.random() * 0.2, entry.close)
                entries.append(None)
            else:
                entries.append(entry)
                readers.append(asyncio.create_task(answer(entry)))
            await asyncio.sleep(rng.random() * 0.01)
        got = await asyncio.gather(*readers)
        preempted = sum(e.num_preemptions for e in entries if e is not None)
    wanted = [e for e, entry in zip(expected, entries, strict=True) if entry is not None]
    assert got == wanted
    assert preempted > 0


async def test_a_conversation_finds_its_earlier_turns(socket: str) -> None:
    first = random_requests(9, 1)[0]
    first = dataclasses.replace(first, stopping=StoppingParameters(max_new_tokens=20))
    async with scheduler(socket, clever=True, tokens=CAPACITY, chunk=1024) as clever:
        ids, _ = await answer(clever.submit(first))
        longer = (*first.input_ids, *ids, 7, 8, 9)
        second = dataclasses.replace(first, input_ids=longer, input_length=len(longer))
        entry = clever.submit(second)
        got = await answer(entry)
        assert clever.allocator is not None
        assert clever.allocator.num_cached > 0  # type: ignore[attr-defined]
    assert got == (await alone(socket, [second]))[0]
