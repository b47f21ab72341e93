"""Requests that arrive at random moments with prompts and answers of many lengths, as users send them."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson
import uvloop

from launcher.bench.apis import Api, Sampling, TgiApi
from launcher.bench.load import Target, stream_once
from launcher.bench.results import Cell, RequestTimes, summarise
from launcher.http_stream import BadAnswerError


@dataclass(frozen=True, slots=True)
class Spread:
    """Shortest and longest, in tokens. Lengths are spread evenly over their logarithms: many short, few long."""

    least: int
    most: int

    def draw(self, source: random.Random) -> int:
        return round(math.exp(source.uniform(math.log(self.least), math.log(self.most))))

    @property
    def mean(self) -> float:
        if self.least == self.most:
            return float(self.least)
        return (self.most - self.least) / math.log(self.most / self.least)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the start, its prompt, tokens of its answer."""

    at_s: float
    prompt: str
    output: int


def moments(count: int, rate: float, source: random.Random) -> list[float]:
    """Of a Poisson process of `rate` a second, in seconds after its start."""
    return list(itertools.accumulate(source.expovariate(rate) for _ in range(count)))


def draw(
    count: int, rate: float, asked: Spread, answered: Spread, make_prompt: Callable[[int, int], str], seed: int
) -> list[Arrival]:
    """`count` requests, `rate` a second. make_prompt: of a length, from a number that no other request has."""
    source = random.Random(seed)
    return [
        Arrival(at, make_prompt(asked.draw(source), 10_000 * seed + number), answered.draw(source))
        for number, at in enumerate(moments(count, rate, source))
    ]


def send(url: str, arrivals: list[Arrival], api: Api | None = None) -> Cell:
    """Send each at its moment, whether others have been answered or not; greedy, each answer of its full length.
    api: the route; None: TGI's."""
    return uvloop.run(_send(Target(url=url, api=api or TgiApi(Sampling(None, ignore_eos=True))), arrivals))


async def _send(target: Target, arrivals: list[Arrival]) -> Cell:
    times: list[RequestTimes] = []
    errors: list[str] = []
    started = time.perf_counter()

    async def one(arrival: Arrival) -> None:
        due = started + arrival.at_s
        await asyncio.sleep(due - time.perf_counter())
        connection = target.connect()
        body = orjson.dumps(target.api.body(arrival.prompt, arrival.output))
        try:
            times.append(await stream_once(connection, target, body, lambda: None, due=due))
        except (BadAnswerError, OSError) as error:
            errors.append(str(error))
        finally:
            connection.close()

    await asyncio.gather(*(one(arrival) for arrival in arrivals))
    return summarise("arrivals", times, errors, time.perf_counter() - started, min(a.output for a in arrivals))
