"""One generation under way: its permit, its events, its end. Knows neither HTTP nor how requests are scheduled.

Every generation holds one permit from admission to its end; `Running.close` is the one place that gives it back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from router.errors import GenerationError, IncompleteError, RouterError
from router.events import Event, Failed, Finished, FinishReason, Prefilled, Token, TokenGenerated
from router.metrics import Metrics
from router.request import ValidRequest
from router.tracing import RequestSpan, described

logger = logging.getLogger(__name__)

_MAX_SHOWN = 1000  # characters of an output, and those at level debug only
_MAX_ARRIVED = 64


class Entry(Protocol):
    """The reading end of a queued request; see `router.scheduling.entry`."""

    @property
    def queued_at(self) -> float: ...
    async def next_event(self) -> Event: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the parts of a finished request took, in seconds."""

    total: float
    validation: float
    queue: float
    inference: float
    num_tokens: int

    @property
    def per_token(self) -> float:
        return self.inference / max(self.num_tokens, 1)


@dataclass(frozen=True, kw_only=True)
class Generation:
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
    best_of_sequences: list[Generation] = field(default_factory=list)


class Permits:
    """The admission limit; try-acquire, never wait."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0

    def take(self, number: int) -> bool:
        if self.num_taken + number > self.limit:
            return False
        self.num_taken += number
        return True

    def give_back(self, number: int) -> None:
        self.num_taken -= number


class Admission:
    """The permits of one HTTP request. A context manager: what no generation took over goes back at its end."""

    def __init__(self, permits: Permits, number: int, request_id: str, request_span: RequestSpan | None = None) -> None:
        self._permits = permits
        self._left = number
        self.request_id = request_id
        self.request_span = request_span
        self.arrived_at = time.monotonic()

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        self._permits.give_back(self._left)
        self._left = 0

    def hand_over(self) -> Permits:
        """One permit changes hands: its new holder gives it back."""
        assert self._left > 0
        self._left -= 1
        return self._permits


Item = Prefilled | TokenGenerated | Finished


class Running:
    """One generation under way. Read it to its `Finished` event, or close it: both return the permit."""

    __slots__ = (
        "_closed",
        "_entry",
        "_last_token_at",
        "_metrics",
        "_permits",
        "_request_span",
        "arrived_at",
        "request",
        "request_id",
        "timings",
    )

    def __init__(self, request: ValidRequest, entry: Entry, metrics: Metrics, admission: Admission) -> None:
        self.request = request
        self.request_id = admission.request_id
        self.arrived_at = admission.arrived_at
        self.timings: Timings | None = None  # known after `Finished`
        self._entry = entry
        self._request_span = admission.request_span
        self._permits = admission.hand_over()
        self._metrics = metrics
        self._last_token_at = 0.0
        self._closed = False

    async def next_event(self) -> Item:
        """The next event. Raises the RouterError that ends the generation; nothing follows that or `Finished`."""
        event = await self._entry.next_event()
        if isinstance(event, TokenGenerated):
            self._observe_token()
        elif isinstance(event, Finished):
            self._observe_token()
            self._finish(event)
        elif isinstance(event, Failed):
            if self.request.trace is not None:
                self.request.trace.finish(event.error)
            self.close()
            raise self._failure(event.error)
        return event

    def close(self) -> None:
        """Ends the generation, whoever it was that stopped reading. Idempotent."""
        if not self._closed:
            self._closed = True
            self._entry.close()
            self._permits.give_back(1)
            if self.request.trace is not None:
                self.request.trace.finish()

    def _observe_token(self) -> None:
        now = time.monotonic()
        if self._last_token_at:
            self._metrics.observe("tgi_request_inter_token_duration", now - self._last_token_at)
        else:
            self._metrics.observe("tgi_request_time_to_first_token_duration", now - self.arrived_at)
        self._last_token_at = now

    def _finish(self, event: Finished) -> None:
        now = time.monotonic()
        timings = Timings(
            total=now - self.arrived_at,
            validation=event.queued_at - self.arrived_at,
            queue=event.started_at - event.queued_at,
            inference=now - event.started_at,
            num_tokens=event.generated_tokens,
        )
        self.timings = timings
        self.close()
        observe = self._metrics.observe
        self._metrics.count("tgi_request_success")
        observe("tgi_request_duration", timings.total)
        observe("tgi_request_validation_duration", timings.validation)
        observe("tgi_request_queue_duration", timings.queue)
        observe("tgi_request_inference_duration", timings.inference)
        observe("tgi_request_mean_time_per_token_duration", timings.per_token)
        observe("tgi_request_generated_tokens", event.generated_tokens)
        if self._request_span is not None:
            self._request_span.record(self._span_fields(event, timings))
        if logger.isEnabledFor(logging.INFO):
            numbers = {
                "input_length": self.request.input_length,
                "generated_tokens": event.generated_tokens,
                "finish_reason": event.finish_reason,
            }
            logger.info("Success", extra=self._log_fields() | numbers)
            logger.debug("Output: %s", event.text[:_MAX_SHOWN], extra={"request_id": self.request_id})

    def _span_fields(self, event: Finished, timings: Timings) -> dict[str, str]:
        """TGI's names."""
        return {
            "parameters": described(self.request),
            "total_time": spell_duration(timings.total),
            "validation_time": spell_duration(timings.validation),
            "queue_time": spell_duration(timings.queue),
            "inference_time": spell_duration(timings.inference),
            "time_per_token": spell_duration(timings.per_token),
            "seed": str(event.seed),
        }

    def _log_fields(self) -> dict[str, object]:
        return {"request_id": self.request_id} if self._request_span is None else self._request_span.log_fields()

    def _failure(self, error: Exception) -> RouterError:
        # The scheduler has counted what it failed itself (err="generation").
        if isinstance(error, IncompleteError):
            self._metrics.count("tgi_request_failure", err="incomplete")
        failure = error if isinstance(error, RouterError) else GenerationError(str(error))
        logger.error("%s", failure, extra=self._log_fields())
        return failure


class Run(Protocol):
    """What can be read like a `Running`."""

    @property
    def request(self) -> ValidRequest: ...
    @property
    def request_id(self) -> str: ...
    @property
    def timings(self) -> Timings | None: ...
    async def next_event(self) -> Item: ...
    def close(self) -> None: ...


AnyRun = TypeVar("AnyRun", bound=Run)


async def start_all(starts: Iterable[Callable[[], Awaitable[AnyRun]]]) -> list[AnyRun]:
    """Queues all or none, one after the other."""
    running: list[AnyRun] = []
    try:
        for start in starts:
            running.append(await start())
    except BaseException:
        for one in running:
            one.close()
        raise
    return running


async def collect(running: Run) -> Generation:
    """Reads a generation to its end."""
    tokens: list[Token] = []
    top_tokens: list[tuple[Token, ...]] = []
    prefill: tuple[Token, ...] = ()
    try:
        while True:
            event = await running.next_event()
            if isinstance(event, Prefilled):
                prefill = event.tokens
                continue
            tokens.append(event.token)
            top_tokens.append(event.top_tokens)
            if isinstance(event, Finished):
                break
    finally:
        running.close()
    assert running.timings is not None
    return Generation(
        request=running.request,
        text=event.text,
        tokens=tokens,
        top_tokens=top_tokens if running.request.top_n_tokens else [],
        prefill=prefill,
        finish_reason=event.finish_reason,
        generated_tokens=event.generated_tokens,
        seed=event.seed,
        timings=running.timings,
    )


async def collect_all(running: Sequence[Run]) -> list[Generation]:
    """Reads several generations side by side; the first failure ends them all."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(one)) for one in running]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for one in running:
            one.close()
    return [task.result() for task in tasks]


async def interleaved(running: Sequence[Run]) -> AsyncGenerator[tuple[int, Item], None]:
    """The events of several generations as they come, each with its generation's index. Raises the first failure."""
    async with aclosing(arrivals(running)) as items:
        async for index, item in items:
            if isinstance(item, Exception):
                raise item
            yield index, item


async def arrivals(running: Sequence[Run]) -> AsyncGenerator[tuple[int, Item | Exception], None]:
    """As `interleaved`, but a failure is an item too: the last of its generation, and the others go on."""
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


def spell_duration(seconds: float) -> str:
    """As TGI's log spells it: `1.2ms`, `3.4s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{round(seconds * factor, 6):g}{unit}"
    return f"{round(seconds * 1e9):d}ns"
