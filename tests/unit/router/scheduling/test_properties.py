"""Whatever happens, blocks come back, everybody gets an end, and running ahead changes nothing but the speed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.fake_rows import Script
from support.fake_shard import FakeShard, ShardFailure
from support.scheduler_harness import Harness, collect, running_scheduler, settle, tokens_of

from router.events import Event, Failed, Finished
from router.scheduling import growth
from router.scheduling.queue import request_queue

ARRIVE, LEAVE, STEP, FAIL, PROBE = "arrive", "leave", "step", "fail", "probe"

arrivals = st.tuples(st.just(ARRIVE), st.integers(1, 9), st.integers(1, 12))
others = st.tuples(st.sampled_from([LEAVE, STEP, STEP, STEP, FAIL, PROBE]), st.integers(0, 7), st.just(0))
scripts = st.dictionaries(
    st.sampled_from([f"r{i}" for i in range(30)]),
    st.builds(Script, eos_after=st.none() | st.integers(1, 5), error_at=st.none() | st.integers(1, 5)),
    max_size=8,
)
limits = st.fixed_dictionaries(
    {
        "max_batch_total_tokens": st.sampled_from([16, 24, 60]),
        "max_batch_size": st.sampled_from([None, 2, 4]),
        "max_batch_prefill_tokens": st.sampled_from([6, 12]),
        "waiting_served_ratio": st.sampled_from([0.0, 0.5, 1.2]),
        "max_waiting_tokens": st.sampled_from([1, 4, 20]),
    }
)


@pytest.fixture(autouse=True, scope="module")
def _small_reservations():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_queue, "RESERVED_NEW_TOKENS", 3)
        patch.setattr(growth, "_STEP_TOKENS", 2)
        yield


@settings(max_examples=examples(60, 1000), deadline=None)
@given(
    world_size=st.sampled_from([1, 1, 2]),
    block_size=st.sampled_from([1, 4]),
    chunking=st.booleans(),
    prefix_caching=st.booleans(),
    pipeline_depth=st.sampled_from([2, 2, 1, 3]),
    micro_batches=st.sampled_from([1, 1, 3, 5]),
    device_type=st.sampled_from(["cpu", "cuda"]),
    drafts=st.sampled_from([0, 0, 3, 9]),
    adapter_slots=st.sampled_from([None, None, 1, 2]),
    chunk=st.sampled_from([4, 9, 100]),
    scripts=scripts,
    limits=limits,
    actions=st.lists(st.one_of(arrivals, others), max_size=40),
)
def test_everything_is_free_again_and_everybody_hears_the_end(
    world_size, block_size, chunking, prefix_caching, pipeline_depth, micro_batches, device_type,
    drafts, adapter_slots, chunk, scripts, limits, actions,
):  # fmt: skip
    shards = [
        FakeShard(
            rank=rank, world_size=world_size, block_size=block_size, scripts=dict(scripts),
            chunking=chunking, prefix_caching=prefix_caching, max_prefill_tokens=chunk,
            pipeline_depth=pipeline_depth, device_type=device_type, drafts=drafts,
            micro_batches=micro_batches, adapter_slots=adapter_slots,
        )
        for rank in range(world_size)
    ]  # fmt: skip

    async def run() -> None:
        async with running_scheduler(*shards, **limits) as h:
            probes = [await act(h, action, number) for number, action in enumerate(actions)]
            await h.finish()
            for name, entry in h.entries.items():
                if not entry.closed:
                    check_events(name, await collect(entry))
            assert h.scheduler.failure is None
            await asyncio.gather(*(probe for probe in probes if probe is not None))
            await settle()
            assert all(shard.batches == {} for shard in shards)

    with pytest.MonkeyPatch.context() as patch:
        # At least what the steps bring that may be sent before the answer with the first token.
        patch.setattr(request_queue, "RESERVED_NEW_TOKENS", 3 * (drafts + 1))
        asyncio.run(run())


def check_events(name: str, events: list[Event]) -> None:
    """Every token once and in order, whatever the request went through; then one end."""
    assert isinstance(events[-1], Finished | Failed)
    tokens = tokens_of(events)
    assert tokens == [f"{name}{i}" for i in range(1, len(tokens) + 1)]
    if isinstance(events[-1], Finished):
        assert events[-1].generated_tokens == len(tokens)


async def act(h: Harness, action: tuple[str, int, int], number: int) -> asyncio.Task[bool] | None:
    kind, size, new = action
    if kind == ARRIVE:
        if h.scheduler.can_ever_fit(size, new):
            # Two vocabularies: some prompts begin alike, some do not.
            first = number % 2
            adapter = (None, "a", "b", "c", "d")[(number * 7 + size) % 5]
            ids = tuple(range(first, first + size))
            h.submit(f"r{number}", size, new, input_ids=ids, truncate=100, adapter_id=adapter)
    elif kind == LEAVE:
        entries = list(h.entries.values())
        if entries:
            entries[size % len(entries)].close()
    elif kind == FAIL:
        fail_next_call(h.shards[size % len(h.shards)])
    elif kind == PROBE:
        return asyncio.create_task(h.scheduler.check_health())
    else:
        await h.step(size % 3 + 1)
    return None


def fail_next_call(shard: FakeShard) -> None:
    def failure(rpc: str, request: object) -> ShardFailure | None:
        if rpc not in ("Prefill", "Decode", "FilterBatch"):
            return None
        shard.failure = lambda rpc, request: None
        return ShardFailure("injected")

    shard.failure = failure


@dataclass
class Outcome:
    """What one run of a schedule showed."""

    admitted: list[str]
    tokens: dict[str, list[str]]
    decodes_before: dict[str, int]  # admission -> Decodes executed before it
    chunks_before: dict[str, int]  # how many of them computed a part of a prompt


async def outcome(shard: FakeShard, arrivals: list[tuple[int, int, int]], limits) -> Outcome:
    """Requests come after a given number of answered Decodes (or earlier, if the server falls idle before that)."""
    async with running_scheduler(shard, **limits) as h:
        waiting = [(at, f"r{i}", length, new) for i, (at, length, new) in enumerate(arrivals)]
        waiting = [a for a in sorted(waiting) if h.scheduler.can_ever_fit(a[2], a[3])]
        for _ in range(2000):
            now = sum(step.startswith("D(r") for step in h.trace)
            idle = not h.scheduler.num_running and not len(h.scheduler._queue)
            while waiting and (waiting[0][0] <= now or idle):
                _, name, length, new = waiting.pop(0)
                h.submit(name, length, new)
                idle = False
            if idle:
                break
            await h.step()
        admitted: list[str] = []
        decodes_before: dict[str, int] = {}
        chunks_before: dict[str, int] = {}
        for index, step in enumerate(h.trace):
            if step.startswith("P("):
                names = [name.split(":")[0] for name in step[2:-1].split("+")[0].split(",")]
                admitted += names
                before = [s for s in h.trace[:index] if s.startswith("D(r")]
                decodes_before |= dict.fromkeys(names, len(before))
                chunks_before |= dict.fromkeys(names, sum(":" in s for s in before))
        tokens = {name: tokens_of(await collect(entry)) for name, entry in h.entries.items()}
        return Outcome(admitted, tokens, decodes_before, chunks_before)


@settings(max_examples=examples(20, 300), deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=10),
    scripts=st.dictionaries(
        st.sampled_from([f"r{i}" for i in range(10)]), st.builds(Script, eos_after=st.integers(1, 6)), max_size=4
    ),
    limits=limits,
)
def test_running_ahead_gives_the_same_tokens_in_the_same_order(arrivals, scripts, limits):
    lock_step = asyncio.run(outcome(FakeShard(pipeline_depth=1, scripts=scripts), arrivals, limits))
    ahead = asyncio.run(outcome(FakeShard(scripts=scripts), arrivals, limits))
    assert ahead.admitted == lock_step.admitted
    assert ahead.tokens == lock_step.tokens


@settings(max_examples=examples(15, 240), deadline=None)
@given(
    running=st.integers(3, 12),
    newcomer=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    at=st.integers(1, 8),
    limits=limits,
)
def test_running_ahead_delays_an_admission_by_at_most_two_decodes(running, newcomer, at, limits):
    limits = limits | {"max_batch_size": None, "max_batch_total_tokens": 60, "max_batch_prefill_tokens": 12}
    arrivals = [(0, 2, 40), (0, 1, running), (at, *newcomer)]
    lock_step = asyncio.run(outcome(FakeShard(pipeline_depth=1), arrivals, limits))
    ahead = asyncio.run(outcome(FakeShard(), arrivals, limits))
    assert ahead.tokens == lock_step.tokens
    assert ahead.decodes_before["r2"] - lock_step.decodes_before["r2"] <= 2


def in_chunks(pipeline_depth: int, limits, scripts: dict[str, Script], device_type: str = "cpu") -> FakeShard:
    return FakeShard(
        chunking=True,
        device_type=device_type,
        pipeline_depth=pipeline_depth,
        max_prefill_tokens=limits["max_batch_prefill_tokens"],
        scripts=scripts,
    )


@settings(max_examples=examples(25, 500), deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 25), st.integers(1, 9)), min_size=1, max_size=8),
    scripts=scripts,
    limits=limits,
    default_tokens=st.sampled_from([3, 6]),
    pipeline_depth=st.sampled_from([2, 3]),
    device_type=st.sampled_from(["cpu", "cuda"]),
)
def test_chunks_sent_ahead_give_the_same_tokens(arrivals, scripts, limits, default_tokens, pipeline_depth, device_type):
    limits = limits | {"default_prefill_tokens": default_tokens}
    scripts = {name: Script(eos_after=script.eos_after) for name, script in scripts.items()}
    lock_step = asyncio.run(outcome(in_chunks(1, limits, scripts), arrivals, limits))
    ahead = asyncio.run(outcome(in_chunks(pipeline_depth, limits, scripts, device_type), arrivals, limits))
    assert ahead.tokens == lock_step.tokens


@settings(max_examples=examples(25, 500), deadline=None)
@given(
    long=st.tuples(st.integers(4, 40), st.integers(1, 12)),
    newcomer=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    at=st.integers(1, 12),
    pipeline_depth=st.sampled_from([2, 3]),
)
def test_chunks_sent_ahead_delay_no_admission_by_a_chunk(long, newcomer, at, pipeline_depth):
    limits = {"max_batch_prefill_tokens": 12, "default_prefill_tokens": 4}
    arrivals = [(0, 2, 40), (0, *long), (at, *newcomer)]
    lock_step = asyncio.run(outcome(in_chunks(1, limits, {}), arrivals, limits))
    ahead = asyncio.run(outcome(in_chunks(pipeline_depth, limits, {}), arrivals, limits))
    assert ahead.tokens == lock_step.tokens
    assert ahead.chunks_before["r2"] <= lock_step.chunks_before["r2"]
    assert ahead.decodes_before["r2"] - lock_step.decodes_before["r2"] <= pipeline_depth
