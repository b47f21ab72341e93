"""Closed and open loops of streaming requests."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson

from launcher.bench.apis import Api, Usage, explained
from launcher.bench.results import Cell, RequestTimes, summarise
from launcher.http_stream import BadAnswerError, Connection, event_object


@dataclass
class Progress:
    """What a live view may look at while a cell runs."""

    load: str = ""
    running: int = 0
    answered: int = 0
    total: int = 0
    tokens: int = 0
    errors: int = 0
    started: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Whom to send to, and by which route."""

    url: str
    api: Api
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0

    def connect(self) -> Connection:
        return Connection(self.url, self.headers)


async def stream_once(
    connection: Connection, target: Target, body: bytes, on_token: Callable[[], None], *, due: float | None = None
) -> RequestTimes:
    """Send one request and time it from `due` (of `time.perf_counter`), or from now.

    Raises:
        BadAnswerError, OSError, TimeoutError: The request failed.
    """
    usage = Usage()
    arrivals: list[float] = []
    started = time.perf_counter() if due is None else due
    async with asyncio.timeout(target.timeout_s):
        async with aclosing(connection.events(target.api.path, body)) as answer:
            async for events in answer:
                now = time.perf_counter()
                for event in events:
                    if target.api.read(event_object(event), usage):
                        arrivals.append(now)
                        on_token()
    if not arrivals:
        raise BadAnswerError("the stream ended without a token")
    return RequestTimes(
        first_token_s=arrivals[0] - started,
        last_token_s=arrivals[-1] - started,
        gaps_s=[b - a for a, b in itertools.pairwise(arrivals)],
        output_tokens=usage.output_tokens or len(arrivals),
        prompt_tokens=usage.prompt_tokens,
    )


class Load:
    """Sends the prompts of one cell and collects what becomes of them."""

    def __init__(self, target: Target, num_tokens: int, progress: Progress | None = None) -> None:
        self._target = target
        self._num_tokens = num_tokens
        self._progress = progress or Progress()
        self._times: list[RequestTimes] = []
        self._errors: list[str] = []

    async def closed(self, prompts: list[str], concurrency: int) -> Cell:
        """`concurrency` clients send all prompts, each with a connection of its own."""
        waiting = list(reversed(prompts))

        async def client() -> None:
            connection = self._target.connect()
            while waiting:
                await self._send(connection, waiting.pop())
            connection.close()

        name = "1 client" if concurrency == 1 else f"{concurrency} clients"
        return await self._measure(name, len(prompts), asyncio.gather(*(client() for _ in range(concurrency))))

    async def open(self, prompts: list[str], rate: float, seed: int) -> Cell:
        """Prompts arrive `rate` times a second at random moments, whether others have been answered or not."""
        chosen = random.Random(seed)

        async def arrive(prompt: str, due: float) -> None:
            await asyncio.sleep(due - time.perf_counter())
            connection = self._target.connect()
            # A client that comes late to it, on a machine that is busy, is not to hide that the answer came late.
            await self._send(connection, prompt, due=due)
            connection.close()

        gaps = [chosen.expovariate(rate) for _ in prompts]
        moments = itertools.accumulate(gaps, initial=time.perf_counter())
        next(moments)
        arrivals = asyncio.gather(*(arrive(p, at) for p, at in zip(prompts, moments, strict=True)))
        return await self._measure(f"{rate:g} requests/s", len(prompts), arrivals)

    async def _measure(self, load: str, total: int, work: asyncio.Future[list[None]]) -> Cell:
        progress = self._progress
        progress.load, progress.total, progress.started = load, total, time.perf_counter()
        progress.running = progress.answered = progress.tokens = progress.errors = 0
        started = time.perf_counter()
        await work
        return summarise(load, self._times, self._errors, time.perf_counter() - started, self._num_tokens)

    async def _send(self, connection: Connection, prompt: str, *, due: float | None = None) -> None:
        self._progress.running += 1
        try:
            body = orjson.dumps(self._target.api.body(prompt, self._num_tokens))
            self._times.append(await stream_once(connection, self._target, body, self._count, due=due))
            self._progress.answered += 1
        except (BadAnswerError, OSError) as error:  # TimeoutError is an OSError
            connection.close()
            self._progress.errors += 1
            self._errors.append(explained(error))
        finally:
            self._progress.running -= 1

    def _count(self) -> None:
        self._progress.tokens += 1
