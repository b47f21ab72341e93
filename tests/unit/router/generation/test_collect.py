"""Several generations of one answer: what their client does not read stays with them, where it is bounded."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from support.factories import make_request

from router.events import Finished, Token, TokenGenerated
from router.generation.collect import arrivals
from router.generation.permits import HeldPermits, PermitPool
from router.generation.running import Running
from router.metrics import Metrics
from router.scheduling.entry import Entry


async def test_choices_that_nobody_reads_are_bounded() -> None:
    entries = [Entry(make_request(), max_unread_bytes=50_000) for _ in range(2)]
    permit_pool = PermitPool(2)
    assert permit_pool.acquire(2)
    with HeldPermits(permit_pool, 2, "id") as permits:
        running = [Running(entry.request, entry, Metrics(), permits) for entry in entries]
    async with aclosing(arrivals(running)) as items:
        entries[0].put(TokenGenerated(Token(1, "a", -1.0)))
        assert (await anext(items))[0] == 0
        for _ in range(1000):
            for entry in entries:
                entry.put(TokenGenerated(Token(1, "a", -1.0)))
            await asyncio.sleep(0)
        assert all(entry.closed and len(entry._events) < 300 for entry in entries)
        got = [item async for _, item in items]
    assert len(got) < 700 and sum(isinstance(item, Exception) for item in got) == 2
    assert not any(isinstance(item, Finished) for item in got)
    assert permit_pool.num_taken == 0
