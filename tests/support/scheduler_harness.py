"""A scheduler on fake shards inside the test's own loop: driven call by call, and checked when it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from support.factories import RecordingMetrics, make_limits, make_request
from support.fake_shard import FakeShard
from support.fake_shard_server import FakeClient

from router.events import Event, Failed, Finished, TokenGenerated
from router.scheduling.entry import MAX_UNREAD_BYTES, Entry
from router.scheduling.loop import Scheduler
from router.shards.pool import ShardPool
from router.shards.warm_up import WarmUpPlan


@dataclass
class Harness:
    """Shards, scheduler and what it counted. `shard` is rank 0, `trace` its calls in the order of execution."""

    shards: list[FakeShard]
    scheduler: Scheduler
    metrics: RecordingMetrics
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def shard(self) -> FakeShard:
        return self.shards[0]

    @property
    def trace(self) -> list[str]:
        return self.shard.trace

    def submit(self, name: str, input_length: int = 1, max_new_tokens: int = 1, **changes: Any) -> Entry:
        entry = self.scheduler.submit(make_request(name, input_length, max_new_tokens, **changes))
        self.entries[name] = entry
        for shard in self.shards:
            shard.names[entry.request_id] = name
        return entry

    async def step(self, count: int = 1) -> None:
        """Let the shards execute `count` calls, one after the other, and the scheduler react to each."""
        await settle()
        for _ in range(count):
            for shard in self.shards:
                shard.step()
            await settle()

    async def finish(self) -> None:
        """Run until nothing is queued or running."""
        for shard in self.shards:
            shard.run_freely()
        await settle()
        while len(self.scheduler._queue) or self.scheduler.num_running:
            await settle()

    def check(self) -> None:
        for shard in self.shards:
            assert shard.violations == []
        allocator = self.scheduler.allocator
        if allocator is not None:
            assert allocator.num_free == allocator.num_usable


@contextlib.asynccontextmanager
async def running_scheduler(
    *shards: FakeShard,
    stepwise: bool = True,
    max_step_s: float = 60.0,
    max_request_s: float | None = None,
    max_unread_bytes: int = MAX_UNREAD_BYTES,
    **limits: Any,
) -> AsyncIterator[Harness]:
    """stepwise: calls after the start are executed only as `Harness.step` says."""
    pool = ShardPool([FakeClient(shard) for shard in shards])
    await pool.clear_all()
    info = await pool.info()
    plan = WarmUpPlan(max_input_tokens=None, max_prefill_tokens=16, max_total_tokens=None, max_batch_size=None)
    await pool.warm_up(plan)
    metrics = RecordingMetrics()
    scheduler = Scheduler(
        pool,
        info,
        make_limits(**limits),
        metrics,
        max_step_s=max_step_s,
        max_request_s=max_request_s,
        max_unread_bytes=max_unread_bytes,
    )
    for shard in shards:
        shard.trace.clear()
        shard.permits = 0 if stepwise else None
    task = asyncio.create_task(scheduler.run())
    harness = Harness(list(shards), scheduler, metrics)
    await settle()
    try:
        yield harness
        if scheduler.failure is None:
            await harness.finish()
            await scheduler.drain()
        harness.check()
    finally:
        await scheduler.close()
        await task


async def settle() -> None:
    """Let everything that can happen without a further call happen."""
    for _ in range(30):
        await asyncio.sleep(0)


async def collect(entry: Entry) -> list[Event]:
    """All events of an entry up to its last."""
    events: list[Event] = []
    while not events or not isinstance(events[-1], Finished | Failed):
        events.append(await asyncio.wait_for(entry.next_event(), 20))
    return events


def tokens_of(events: list[Event]) -> list[str]:
    return [e.token.text.strip() for e in events if isinstance(e, TokenGenerated | Finished)]
