"""Three times the requests that fit: what is refused is refused at once, and what is served is served as without."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import httpx
from hostile.answers import check
from hostile.target import CONCURRENT, Target
from support.raw_http import generation


async def overload(target: Target, source: random.Random, count: int) -> Counter[str]:
    """Open-loop load; the rate that fits is measured first."""
    seen: Counter[str] = Counter()
    async with target.client() as client:
        alone = await _goodput(client, CONCURRENT // 2, count // 4)

        async def ask() -> None:
            answer = await client.post("/generate", json=generation(32))
            check(answer, frozenset({429}))
            seen[str(answer.status_code)] += 1

        asked = []
        for _ in range(count):
            asked.append(asyncio.create_task(ask()))
            await asyncio.sleep(source.expovariate(3 * alone))
        await asyncio.gather(*asked)
    return seen


async def _goodput(client: httpx.AsyncClient, num_clients: int, count: int) -> float:
    """Answers per second of clients that wait for each answer."""
    left = iter(range(count))

    async def ask() -> None:
        for _ in left:
            assert (await client.post("/generate", json=generation(32))).status_code == 200

    started = time.monotonic()
    await asyncio.gather(*(ask() for _ in range(num_clients)))
    return count / (time.monotonic() - started)
