"""Hours of abuse in minutes: `make soak`. Not part of the tests; a short form is in tests/e2e/test_abuse.py.

Phases, each followed by the invariants (nothing held, same tokens as before, descriptors and threads as before) and by
a look at memory: clients that leave at random moments, random bodies on every route, and more load than fits.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx
from support.hostile_clients import leave_early
from support.invariants import Invariants
from support.random_bodies import random_request
from support.raw_http import generation
from support.running_server import RunningServer, running_server

CONCURRENT = 64
AT_ONCE = 50
# Allocators need a while to settle; growth counts from the second look on.
MAX_GROWTH = 0.05
ALLOWED = {200, 400, 413, 415, 422, 429, 503}


async def aborts(server: RunningServer, source: random.Random, count: int) -> Counter[str]:
    """Connect, ask, leave."""
    for _ in range(0, count, AT_ONCE):
        await asyncio.gather(*(leave_early(server.port, source) for _ in range(AT_ONCE)))
    return Counter(connections=count)


async def fuzz(server: RunningServer, source: random.Random, count: int) -> Counter[str]:
    """Random bodies; an answer other than 200 and the refusals ends the soak."""
    statuses: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def ask() -> None:
            path, raw = random_request(source)
            answer = await client.post(path, content=raw, headers={"content-type": "application/json"})
            statuses[str(answer.status_code)] += 1
            if answer.status_code not in ALLOWED:
                raise SystemExit(f"{answer.status_code} for {path}: {raw!r}\n{answer.text}")

        for _ in range(0, count, AT_ONCE):
            await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    return statuses


async def overload(server: RunningServer, source: random.Random, count: int) -> Counter[str]:
    """Open-loop load of three times what fits: the refused are refused at once, the others are served as without."""
    statuses: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        alone = await goodput(client, CONCURRENT // 2, count // 3)

        async def ask() -> None:
            answer = await client.post("/generate", json=generation(32))
            statuses[str(answer.status_code)] += 1

        started = time.monotonic()
        asked = []
        for _ in range(count):
            asked.append(asyncio.create_task(ask()))
            await asyncio.sleep(source.expovariate(3 * alone))
        await asyncio.gather(*asked)
        served = statuses["200"] / (time.monotonic() - started)
    statuses["alone/s"], statuses["overloaded/s"] = round(alone), round(served)
    return statuses


async def goodput(client: httpx.AsyncClient, num_clients: int, count: int) -> float:
    """Answers per second of clients that wait for each answer."""
    left = iter(range(count))

    async def ask() -> None:
        for _ in left:
            assert (await client.post("/generate", json=generation(32))).status_code == 200

    started = time.monotonic()
    await asyncio.gather(*(ask() for _ in range(num_clients)))
    return count / (time.monotonic() - started)


Phase = Callable[[RunningServer, random.Random, int], Awaitable[Counter[str]]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--aborts", type=int, default=10_000, help="connections of clients that leave early")
    parser.add_argument("--fuzz", type=int, default=6_000, help="random bodies")
    parser.add_argument("--overload", type=int, default=2_000, help="requests of the overload phase")
    parser.add_argument("--rounds", type=int, default=2, help="how often all of it is done, in equal parts")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    source = random.Random(asked.seed)
    phases: list[tuple[Phase, int]] = [(aborts, asked.aborts), (fuzz, asked.fuzz), (overload, asked.overload)]
    options = ("--max-concurrent-requests", str(CONCURRENT), "--max-total-tokens", "1024", "--max-input-tokens", "800")
    with running_server("demo", *options, environ={"KSERVE_API": "true"}) as server:
        invariants = Invariants(server)
        sizes: list[int] = []
        for number in range(asked.rounds):
            for phase, count in phases:
                if count == 0:
                    continue
                started = time.monotonic()
                seen = asyncio.run(phase(server, source, count // asked.rounds))
                invariants.check()
                say(f"round {number + 1}, {phase.__name__}: {dict(seen)}, {time.monotonic() - started:.0f} s")
            sizes.append(invariants.memory())
            say(f"round {number + 1}: the router occupies {sizes[-1] / 2**20:.1f} MiB")
    growth = sizes[-1] / sizes[0] - 1 if len(sizes) > 1 else 0.0
    say(f"growth since the first round: {growth:.1%}")
    return 1 if growth > MAX_GROWTH else 0


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
