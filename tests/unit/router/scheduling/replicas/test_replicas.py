"""Several schedulers as one: who gets a request, what fails, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from support.factories import RecordingMetrics, make_limits, make_request
from support.fake_shard import FakeShard, ShardFailure
from support.fake_shard_server import FakeClient
from support.scheduler_harness import collect, settle, tokens_of

from router.errors import UnhealthyError
from router.events import Failed, Finished
from router.scheduling.loop import Scheduler
from router.scheduling.replicas import replicas as module
from router.scheduling.replicas.entry import MovingEntry
from router.scheduling.replicas.gauges import Gauges, ReplicaMetrics
from router.scheduling.replicas.replicas import Replicas, Served
from router.shards.pool import ShardPool
from router.shards.warm_up import WarmUpPlan
from wire.cli.replica_options import ReplicaPolicy


class Scene:
    """Replicas on fake shards; `shards` are those of the last start of each."""

    def __init__(self) -> None:
        self.metrics = RecordingMetrics()
        self.shards: list[FakeShard] = []
        self.num_starts = 0
        self.is_back = asyncio.Event()
        self.replicas: Replicas

    async def served(self, number: int, gauges: Gauges) -> Served:
        shard = FakeShard(chunking=True, prefix_caching=True)
        self.shards[number : number + 1] = [shard]
        pool = ShardPool([FakeClient(shard)])
        await pool.clear_all()
        info = await pool.info()
        await pool.warm_up(
            WarmUpPlan(max_input_tokens=None, max_prefill_tokens=16, max_total_tokens=None, max_batch_size=None)
        )
        shard.trace.clear()
        self.num_starts += 1
        return Scheduler(pool, info, make_limits(), ReplicaMetrics(self.metrics, gauges, number)), pool

    def submit(self, name: str, input_length: int = 1, max_new_tokens: int = 1, **changes: Any) -> MovingEntry:
        entry = self.replicas.submit(make_request(name, input_length, max_new_tokens, **changes))
        self.shards[entry._place.number].names[entry._entry.request_id] = name  # type: ignore[attr-defined]
        return entry

    def place(self, entry: MovingEntry) -> int:
        return int(entry._place.number)  # type: ignore[attr-defined]

    def fail(self, number: int) -> None:
        self.shards[number].failure = lambda rpc, _: ShardFailure("gone", code=grpc.StatusCode.UNAVAILABLE)


@contextlib.asynccontextmanager
async def scene(count: int = 2, policy: ReplicaPolicy = "prefix") -> AsyncIterator[Scene]:
    made = Scene()
    gauges = Gauges(made.metrics)
    for number in range(count):
        made.metrics.add_values("replica", [str(number)])

    async def connect(number: int) -> Served:
        await made.is_back.wait()
        return await made.served(number, gauges)

    served = [await made.served(number, gauges) for number in range(count)]
    made.replicas = Replicas(served, connect, made.metrics, gauges, policy)
    running = asyncio.ensure_future(made.replicas.run())
    await settle()
    try:
        yield made
    finally:
        await made.replicas.close()
        await running
        await made.replicas.close_shards()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)


async def test_a_prompt_goes_where_its_beginning_is() -> None:
    async with scene() as s:
        first = s.submit("a", 40, 2)
        home = s.place(first)
        assert len(tokens_of(await collect(first))) == 2  # type: ignore[arg-type]
        for _ in range(4):
            again = s.submit("a", 40, 1)
            assert s.place(again) == home
            await collect(again)  # type: ignore[arg-type]
        assert s.place(s.submit("b", 40, 1)) in (0, 1)


async def test_a_busy_replica_is_left_out() -> None:
    async with scene() as s:
        first = s.submit("a", 20, 1)
        await collect(first)  # type: ignore[arg-type]
        long = [s.submit("a", 20, 200) for _ in range(2)]
        await settle()
        assert {s.place(entry) for entry in long} | {s.place(s.submit("a", 20, 1))} == {0, 1}


async def test_in_turn() -> None:
    async with scene(3, "round_robin") as s:
        assert [s.place(s.submit("a")) for _ in range(6)] in ([1, 2, 0] * 2, [0, 1, 2] * 2, [2, 0, 1] * 2)


async def test_a_request_without_an_event_begins_again_elsewhere() -> None:
    async with scene() as s:
        for number in (0, 1):
            s.shards[number].permits = 0
        entries = [s.submit(f"r{number}", 3, 2) for number in range(4)]
        assert {s.place(entry) for entry in entries} == {0, 1}
        s.fail(0)
        for number in (0, 1):
            s.shards[number].run_freely()
        for entry in entries:
            events = await collect(entry)  # type: ignore[arg-type]
            assert isinstance(events[-1], Finished) and s.place(entry) == 1
        assert s.metrics.gauges["tgi_replicas{ready}"] == s.metrics.gauges["tgi_replicas{failed}"] == 1
        assert await s.replicas.check_health()
        # It comes back.
        s.is_back.set()
        await asyncio.sleep(0.05)
        assert s.num_starts == 3 and s.metrics.gauges["tgi_replicas{ready}"] == 2
        assert {s.place(s.submit(f"n{number}")) for number in range(4)} == {0, 1}
        assert s.replicas.failure is None


async def test_a_request_goes_on_behind_the_tokens_that_its_reader_has() -> None:
    async with scene() as s:
        for shard in s.shards:
            shard.permits = 0
        entry = s.submit("a", 3, 9)
        home = s.place(entry)
        await settle()
        s.shards[home].step()
        await settle()
        first = await entry.next_event()
        s.fail(home)
        other = s.shards[1 - home]
        other.names[0] = other.names[1] = "a"
        for shard in s.shards:
            shard.run_freely()
        events = [first, *await collect(entry)]  # type: ignore[arg-type]
        assert isinstance(events[-1], Finished) and events[-1].generated_tokens == 9
        assert tokens_of(events) == [f"a{number}" for number in range(1, 10)]
        assert s.place(entry) == 1 - home and events[-1].cached_tokens <= 3


async def test_log_probabilities_of_a_prompt_come_once() -> None:
    async with scene() as s:
        for shard in s.shards:
            shard.permits = 0
        entry = s.submit("a", 3, 50, decoder_input_details=True)
        shard = s.shards[s.place(entry)]
        await settle()
        shard.step()
        await settle()
        await entry.next_event()
        await entry.next_event()
        s.fail(s.place(entry))
        shard.run_freely()
        assert isinstance((await collect(entry))[-1], Failed)  # type: ignore[arg-type]


async def test_the_last_one_ends_the_router() -> None:
    async with scene() as s:
        entries = [s.submit(f"r{number}", 3, 2) for number in range(2)]
        for number in (0, 1):
            s.fail(number)
        for entry in entries:
            assert isinstance((await collect(entry))[-1], Failed)  # type: ignore[arg-type]
        await settle()
        assert s.replicas.failure is not None
        with pytest.raises(UnhealthyError):
            s.submit("late")
        assert not await s.replicas.check_health()


async def test_gauges_of_all_and_of_each() -> None:
    metrics = RecordingMetrics()
    gauges = Gauges(metrics)
    one, other = (ReplicaMetrics(metrics, gauges, number) for number in (0, 1))
    for number in ("0", "1"):
        metrics.add_values("replica", [number])
    one.gauge("tgi_queue_size", 3)
    other.gauge("tgi_queue_size", 4)
    assert metrics.gauges["tgi_queue_size"] == 7 and metrics.gauges["tgi_replica_queue_size{1}"] == 4
    one.gauge("tgi_kv_cache_usage", 0.5)
    other.gauge("tgi_kv_cache_usage", 0.25)
    one.gauge("tgi_speculation_window", 4)
    other.gauge("tgi_speculation_window", 2)
    assert (metrics.gauges["tgi_kv_cache_usage"], metrics.gauges["tgi_speculation_window"]) == (0.375, 4)
    gauges.forget(0)
    assert metrics.gauges["tgi_queue_size"] == 4 and metrics.gauges["tgi_kv_cache_usage"] == 0.25
    one.count("tgi_request_preempted")
    assert metrics.counts["tgi_request_preempted"] == 1
