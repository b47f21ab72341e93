"""Requests that take too long, and readers that stop: the work ends and everybody hears why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.fake_shard import FakeShard
from support.scheduler_harness import Harness, collect, running_scheduler, settle

from router.errors import GenerationError, OverloadedError, RouterError
from router.events import Event, Failed, Finished
from router.scheduling.entry import Entry


def error_of(events: list[Event]) -> Exception:
    last = events[-1]
    assert isinstance(last, Failed)
    return last.error


Clock = Callable[[Entry], None]


@pytest.fixture
def time_is_over(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Ends an entry's time by hand; that a timer does it is tested with the entry."""
    errors: dict[Entry, Callable[[Entry], RouterError]] = {}
    monkeypatch.setattr(Entry, "end_after", lambda entry, seconds, error: errors.__setitem__(entry, error))
    return lambda entry: entry.expire(errors[entry])


async def test_a_request_that_runs_too_long_fails_and_gives_its_blocks_back(time_is_over):
    async with running_scheduler(FakeShard(), max_request_s=60) as h:
        entry = h.submit("a", 3, 20)
        await h.step(3)
        time_is_over(entry)
        await h.step(2)
        events = await collect(entry)
        assert len(events) >= 3
        error = error_of(events)
        assert isinstance(error, GenerationError) and "not finished after 60 s" in str(error)
        await h.finish()
        assert h.shard.batches == {}
        assert h.metrics.counts["tgi_request_failure{generation}"] == 1
        assert h.metrics.counts["tgi_request_failure{dropped}"] == 0


async def test_a_request_that_waits_too_long_may_try_again(time_is_over):
    async with running_scheduler(FakeShard(), max_request_s=60, max_batch_size=1) as h:
        running, waiting = h.submit("a", 3, 20), h.submit("b", 3, 20)
        await h.step(2)
        time_is_over(waiting)
        [event] = await collect(waiting)
        assert isinstance(event, Failed) and isinstance(event.error, OverloadedError)
        assert event.error.retry_after_s >= 1
        time_is_over(running)
        assert isinstance(error_of(await collect(running)), GenerationError)
        await h.finish()
        assert all("b" not in call for call in h.trace), "it was never begun"


async def test_a_request_in_time_is_left_alone():
    async with running_scheduler(FakeShard(), stepwise=False, max_request_s=30.0) as h:
        events = await collect(h.submit("a", 3, 5))
        assert isinstance(events[-1], Finished)


async def test_a_reader_that_stops_ends_its_request_and_no_other():
    async with running_scheduler(FakeShard(), stepwise=False, max_unread_bytes=20_000) as h:
        stopped, healthy = h.submit("a", 3, 1000), h.submit("b", 3, 1000)
        event: Event | None = None
        num_read = 0
        async with asyncio.timeout(60):
            while not isinstance(event, Finished | Failed):
                event = await healthy.next_event()
                num_read += 1
        assert isinstance(event, Finished) and num_read == 1000
        assert len(stopped._events) <= 20_000 / 256 + 64
        assert "too slowly" in str(error_of(await collect(stopped)))
        await ended(h)
        assert h.metrics.counts["tgi_request_failure{dropped}"] == 1


async def ended(h: Harness) -> None:
    while h.scheduler.num_running:
        await settle()


async def test_a_huge_prompt_delays_nobody_by_more_than_a_chunk_and_comes_to_its_turn():
    """Whoever runs gets a token in every step, and no step computes more than the budget."""
    shard = FakeShard(chunking=True, max_prefill_tokens=16)
    limits = {"max_batch_prefill_tokens": 16, "max_batch_total_tokens": 1000}
    async with running_scheduler(shard, **limits) as h:
        short = [h.submit(name, 2, 40) for name in ("a", "b")]
        await h.step(2)
        huge = h.submit("h", 300, 2)
        unread = [len(entry._events) for entry in short]
        for _ in range(30):
            await h.step(1)
            now = [len(entry._events) for entry in short]
            assert [new - old for new, old in zip(now, unread, strict=True)] == [1, 1]
            unread = now
        assert len(huge._events) or huge.done, "300 tokens at 14 a step"
        assert isinstance((await collect(huge))[-1], Finished) if huge.done else True
