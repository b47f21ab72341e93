"""A request's generations, started all or none, and read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from router.errors import RouterError
from router.events import NO_PLACES, Finished, FinishReason, PlacesTop, Predicted, Prefilled, Token
from router.generation.running import Item, Run
from router.generation.timings import Timings
from router.request import ValidRequest

_MAX_ARRIVED = 64


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """A finished request."""

    request: ValidRequest
    text: str
    tokens: list[Token]
    top_tokens: list[tuple[Token, ...]]
    prefill: tuple[Token, ...]
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    timings: Timings
    cached_tokens: int = 0  # of the prompt, from the prefix cache
    predicted: Predicted | None = None  # None: the request had no prediction
    prefill_top: PlacesTop = NO_PLACES
    best_of_sequences: list[GenerationResult] = field(default_factory=list)


AnyRun = TypeVar("AnyRun", bound=Run)


async def start_all(starts: Iterable[Callable[[], Awaitable[AnyRun]]]) -> list[AnyRun]:
    """Queue all or none."""
    running: list[AnyRun] = []
    try:
        for start in starts:
            running.append(await start())
    except BaseException as error:
        end_all(running, error)
        raise
    return running


def end_all(running: Iterable[Run], error: BaseException | None = None) -> None:
    """End what has not ended; those beside a failed one do not count as dropped by their client."""
    for one in running:
        one.close(is_dropped=not isinstance(error, RouterError))


async def collect(running: Run) -> GenerationResult:
    """Reads a generation to its end."""
    tokens: list[Token] = []
    top_tokens: list[tuple[Token, ...]] = []
    prefilled = Prefilled(())
    try:
        while True:
            event = await running.next_event()
            if isinstance(event, Prefilled):
                prefilled = event
                continue
            tokens.append(event.token)
            top_tokens.append(event.top_tokens)
            if isinstance(event, Finished):
                break
    finally:
        running.close()
    assert running.timings is not None
    return GenerationResult(
        request=running.request,
        text=event.text,
        tokens=tokens,
        top_tokens=top_tokens if running.request.top_n_tokens else [],
        prefill=prefilled.tokens,
        prefill_top=prefilled.top_tokens,
        finish_reason=event.finish_reason,
        generated_tokens=event.generated_tokens,
        seed=event.seed,
        timings=running.timings,
        cached_tokens=event.cached_tokens,
        predicted=event.predicted,
    )


async def collect_all(running: Sequence[Run]) -> list[GenerationResult]:
    """Read generations side by side; the first failure ends all."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(one)) for one in running]
    except ExceptionGroup as failures:
        end_all(running, failures.exceptions[0])
        raise failures.exceptions[0] from None
    finally:
        for one in running:
            one.close()
    return [task.result() for task in tasks]


async def interleaved(running: Sequence[Run]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield several generations' events as they come, until a failure."""
    async with aclosing(arrivals(running)) as items:
        async for index, item in items:
            if isinstance(item, Exception):
                raise item
            yield index, item


async def arrivals(running: Sequence[Run]) -> AsyncGenerator[tuple[int, Item | Exception], None]:
    """Yield as `interleaved`, with failures as last items of their generations."""
    if len(running) == 1:
        item: Item | Exception | None = None
        while not isinstance(item, Finished | Exception):
            try:
                item = await running[0].next_event()
            except Exception as error:
                item = error
            yield 0, item
        return
    # Bounded, so that a slow reader is seen by the entries: they bound what is unread.
    arrived: asyncio.Queue[tuple[int, Item | Exception]] = asyncio.Queue(_MAX_ARRIVED)

    async def forward(index: int) -> None:
        event = None
        try:
            while not isinstance(event, Finished):
                event = await running[index].next_event()
                await arrived.put((index, event))
        except Exception as error:
            await arrived.put((index, error))

    tasks = [asyncio.ensure_future(forward(index)) for index in range(len(running))]
    try:
        num_unfinished = len(running)
        while num_unfinished:
            index, one = await arrived.get()
            num_unfinished -= isinstance(one, Finished | Exception)
            yield index, one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
