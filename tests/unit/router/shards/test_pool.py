"""The pool over real sockets: fan-out, numbers, merging, errors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from support.factories import RecordingMetrics, make_limits, make_request
from support.fake_rows import Script
from support.fake_shard import FakeShard, ShardFailure
from support.fake_shard_server import serve
from support.scheduler_harness import collect, tokens_of

from router.events import Failed
from router.scheduling.loop import Scheduler
from router.shards.client import ShardClient
from router.shards.interface import DecodeCall, NewBatch, NewRequest, PrefillCall, ShardError
from router.shards.pool import ShardPool
from router.shards.warm_up import WarmUpPlan

PLAN = WarmUpPlan(max_input_tokens=None, max_prefill_tokens=64, max_total_tokens=None, max_batch_size=None)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path / "shard")


def new_batch(batch_id: int, *names: str, max_new_tokens: int = 4) -> NewBatch:
    requests = []
    for i, name in enumerate(names):
        first = 1 + 10 * i
        requests.append(NewRequest(i, make_request(name, 1, max_new_tokens), range(first, first + max_new_tokens)))
    return NewBatch(batch_id, requests)


async def started(path: str) -> ShardPool:
    pool = await ShardPool.discover(path)
    await pool.clear_all()
    await pool.info()
    await pool.warm_up(PLAN)
    return pool


async def test_start_up_calls_every_rank_in_order(prefix):
    shards = [FakeShard(rank=r, world_size=2) for r in range(2)]
    async with serve(*shards, prefix=prefix) as path:
        pool = await started(path)
        assert [rpc for rpc, _ in shards[0].received] == ["ServiceDiscovery", "ClearCache", "Info", "Warmup"]
        assert [rpc for rpc, _ in shards[1].received] == ["ClearCache", "Info", "Warmup"]
        clear, warm_up = shards[1].received[0][1], shards[1].received[2][1]
        assert (clear.sequence, warm_up.sequence) == (0, 1)
        await pool.health()
        await pool.close()


async def test_calls_are_numbered_as_they_are_made_and_merged(prefix):
    shards = [FakeShard(rank=r, world_size=2) for r in range(2)]
    async with serve(*shards, prefix=prefix) as path:
        pool = await started(path)
        answers = [
            pool.prefill(PrefillCall(new_batch(0, "a", "b", "c"))),
            pool.decode(DecodeCall([0])),
            pool.decode(DecodeCall([0])),
        ]
        prefilled, first, _ = [await answer for answer in answers]
        assert sorted(i for columns in prefilled.columns for i in columns.request_ids) == [0, 1, 2]
        assert len(first.columns) == 2
        assert list(first.batch.request_ids) == [0, 1, 2]
        assert first.timings.forward_s == pytest.approx(0.002)
        kept = await pool.filter_batch(0, [1])
        assert list(kept.request_ids) == [1]
        await pool.clear_cache(0)
        assert shards[0].trace[1:] == ["P(a,b,c)", "D(a,b,c)", "D(a,b,c)", "F(b)", "C(0)"]
        assert shards[0].violations == shards[1].violations == []
        await pool.close()


async def test_a_filter_that_leaves_nobody_says_so(prefix):
    shard = FakeShard()
    async with serve(shard, prefix=prefix) as path:
        pool = await started(path)
        await pool.prefill(PrefillCall(new_batch(0, "a", max_new_tokens=1)))
        assert await pool.filter_batch(0, [0]) is None
        await pool.close()


async def test_errors_carry_what_the_shard_said(prefix):
    shard = FakeShard()
    async with serve(shard, prefix=prefix) as path:
        pool = await started(path)
        with pytest.raises(ShardError, match="batch 7 is gone") as caught:
            await pool.decode(DecodeCall([7]))
        assert not caught.value.fatal
        shard.failure = lambda rpc, request: ShardFailure("gone", code=grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(ShardError, match="the model server cannot be reached") as caught:
            await pool.health()
        assert caught.value.fatal
        assert caught.value.detail == "Health: gone"
        await pool.close()


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_what_grpc_itself_says_is_for_the_log(prefix, code):
    shard = FakeShard()
    async with serve(shard, prefix=prefix) as path:
        pool = await started(path)
        shard.failure = lambda rpc, request: ShardFailure("/grpc/pair.cc:534 Socket closed", code=code)
        with pytest.raises(ShardError) as caught:
            await pool.health()
        assert str(caught.value) == f"the model server failed ({code.name})"
        assert not caught.value.fatal
        assert caught.value.detail == "Health: /grpc/pair.cc:534 Socket closed"
        await pool.close()


@pytest.mark.parametrize(
    ("code", "unreachable"), [(grpc.StatusCode.UNAVAILABLE, True), (grpc.StatusCode.DEADLINE_EXCEEDED, False)]
)
async def test_a_shard_that_is_slow_is_not_known_to_be_gone(prefix, code, unreachable):
    shard = FakeShard()
    async with serve(shard, prefix=prefix) as path:
        pool = await started(path)
        shard.failure = lambda rpc, request: ShardFailure("no", code=code)
        with pytest.raises(ShardError) as caught:
            await pool.health()
        assert caught.value.fatal
        assert caught.value.unreachable == unreachable
        await pool.close()


async def test_nobody_listens(prefix):
    with pytest.raises(ShardError) as caught:
        await ShardPool.discover(prefix + "-0")
    assert caught.value.fatal
    assert prefix in caught.value.detail
    assert prefix not in str(caught.value)


async def test_answers_above_four_mebibytes_pass(prefix):
    shard = FakeShard()
    async with serve(shard, prefix=prefix) as path:
        pool = await started(path)

        def blow_up(rpc, response):
            response.generations.add(request_id=9, error="x" * 6_000_000)
            return response

        shard.edit = blow_up
        reply = await pool.prefill(PrefillCall(new_batch(0, "a")))
        assert len(reply.rows[0].error) == 6_000_000
        await pool.close()


@pytest.mark.parametrize("world_size", [1, 2])
async def test_a_scheduler_serves_over_real_sockets(prefix, world_size):
    shards = [
        FakeShard(rank=r, world_size=world_size, block_size=4, scripts={"c": Script(eos_after=3)})
        for r in range(world_size)
    ]
    async with serve(*shards, prefix=prefix) as path:
        pool = await ShardPool.discover(path)
        await pool.clear_all()
        info = await pool.info()
        await pool.warm_up(PLAN)
        limits = make_limits(max_batch_total_tokens=64, max_batch_prefill_tokens=16, waiting_served_ratio=0.0)
        scheduler = Scheduler(pool, info, limits, RecordingMetrics())
        task = asyncio.create_task(scheduler.run())
        entries = {name: scheduler.submit(make_request(name, 5, 8)) for name in "abcdefgh"}
        left = scheduler.submit(make_request("left", 5, 8))
        await left.next_event()
        left.close()
        for name, entry in entries.items():
            length = 3 if name == "c" else 8
            assert tokens_of(await collect(entry)) == [f"{name}{i}" for i in range(1, length + 1)]
        assert await scheduler.check_health()
        await scheduler.drain()
        await task
        assert scheduler.failure is None
        assert scheduler.allocator.num_free == scheduler.allocator.num_usable
        for shard in shards:
            assert shard.violations == []
            assert shard.batches == {}
            assert shard.max_in_flight <= 3
        await pool.close()


async def test_a_shard_that_dies_in_mid_stream_fails_its_requests(prefix):
    shard = FakeShard()
    async with serve(shard, prefix=prefix) as path:
        pool = await ShardPool.discover(path)
        await pool.clear_all()
        info = await pool.info()
        scheduler = Scheduler(pool, info, make_limits(), RecordingMetrics())
        task = asyncio.create_task(scheduler.run())
        shard.permits = 3
        entry = scheduler.submit(make_request("a", 5, 100))
        await entry.next_event()
    # The server has stopped with calls in flight.
    assert isinstance((await collect(entry))[-1], Failed)
    await task
    assert isinstance(scheduler.failure, ShardError)
    await pool.close()


async def test_a_shard_that_is_gone_ends_a_step_that_waits_for_another_one_only(prefix):
    """Its own answer had come; the other shard's node is frozen, and silent until its lease is over."""
    gone, frozen = (FakeShard(rank=r, world_size=2, pipeline_depth=1) for r in range(2))
    async with serve(frozen, prefix=f"{prefix}-frozen") as second:
        async with serve(gone, prefix=prefix) as first:
            pool = ShardPool([ShardClient(first), ShardClient(second)])
            await pool.clear_all()
            info = await pool.info()
            scheduler = Scheduler(pool, info, make_limits(), RecordingMetrics())
            task = asyncio.create_task(scheduler.run())
            frozen.permits = 0
            entry = scheduler.submit(make_request("a", 5, 100))
            async with asyncio.timeout(60):
                while not (gone.trace and frozen.num_waiting):  # noqa: ASYNC110 - the fakes have no events
                    await asyncio.sleep(0.005)
            await scheduler.end_if_unreachable()  # behind the answer, on the same connection
            assert scheduler.failure is None
        assert not task.done()
        await scheduler.end_if_unreachable()
        assert isinstance((await collect(entry))[-1], Failed)
        await task
        assert isinstance(scheduler.failure, ShardError)
        await scheduler.end_if_unreachable()  # once is enough
        await pool.close()
