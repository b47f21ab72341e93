"""Sends steps of texts to the shards, and hands out answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Protocol

from router.metrics import PoolingMetrics
from router.pooling.errors import failed
from router.pooling.queue import Entry, TextQueue, Unit
from router.shards.interface import ShardError, StalledError, unreachable
from router.shards.pooling import Numbers, StepAnswer, TextItem
from wire.step_phases import POOLING_PHASES

# One step is computed while the next one waits on the shard: the device is never idle, and a request that comes waits
# for two steps at most.
_IN_FLIGHT = 2
_HEALTH_FACTOR = 0.2  # of a new rate in the moving one


class PooledShards(Protocol):
    """What the scheduler needs of the shards."""

    def run_texts(self, items: Sequence[TextItem]) -> asyncio.Future[StepAnswer]: ...

    async def health(self) -> None: ...


class PooledScheduler:
    """Owns the queue, on the event loop."""

    def __init__(
        self,
        shards: PooledShards,
        metrics: PoolingMetrics,
        *,
        budget: int,
        max_size: int | None = None,
        max_step_s: float = 60.0,
    ) -> None:
        self.queue = TextQueue(budget, max_size)
        self.failure: BaseException | None = None
        self._shards = shards
        self._metrics = metrics
        self._max_step_s = max_step_s
        self._in_flight: dict[int, tuple[float, list[Unit]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._is_over = asyncio.Event()
        self._tokens_per_s = 0.0
        self._is_healthy = True

    @property
    def estimated_wait_s(self) -> float:
        """Until what waits now is computed."""
        return self.queue.num_tokens / self._tokens_per_s if self._tokens_per_s else 1.0

    async def run(self) -> None:
        """Run until `close`, or `failure`."""
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), self._max_step_s / 4)
            oldest = min((since for since, _ in self._in_flight.values()), default=None)
            if oldest is not None and time.monotonic() - oldest > self._max_step_s:
                text = "the model server has not answered a step in time"
                self._end(StalledError(text, detail=f"{text}: --max-step-seconds {self._max_step_s:g}"))

    async def close(self) -> None:
        """What waits and what runs fails."""
        self._end(None)

    async def compute(self, entry: Entry) -> list[Numbers]:
        """Compute texts; cancelling drops waiting ones."""
        if self._is_over.is_set():
            raise failed("the server is stopping")
        self.queue.add(entry)
        self._send_steps()
        try:
            await entry.done
        finally:
            self.queue.remove(entry)
            self._show_queue()
        return [entry.answers[place] for place in range(len(entry.tokens))]

    async def check_health(self) -> bool:
        if self._is_over.is_set():
            return False
        try:
            await self._shards.health()
        except ShardError:
            return False
        return True

    async def end_if_unreachable(self) -> None:
        """Fail if a shard is gone, which a step that waits for another one would not notice."""
        error = None if self._is_over.is_set() else await unreachable(self._shards)
        if error is not None:
            self._end(error)

    def _send_steps(self) -> None:
        while self.queue and len(self._in_flight) < _IN_FLIGHT and not self._is_over.is_set():
            units = self.queue.next_step()
            number, now = next(self._numbers), time.monotonic()
            items = [_item(place, unit) for place, unit in enumerate(units)]
            for unit in units:
                if unit.entry.started_at is None:
                    unit.entry.started_at = now
            num_tokens = sum(len(item.ids) for item in items)
            self._metrics.observe("te_batch_next_size", len(units))
            self._metrics.observe("te_batch_next_tokens", num_tokens)
            self._in_flight[number] = now, units
            task = asyncio.ensure_future(self._answered(number, units, num_tokens, self._shards.run_texts(items)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._show_queue()

    async def _answered(
        self, number: int, units: list[Unit], num_tokens: int, answer: asyncio.Future[StepAnswer]
    ) -> None:
        try:
            found = await answer
        except ShardError as error:
            self._in_flight.pop(number, None)
            for unit in units:
                _fail(unit.entry, str(error))
            if error.fatal:
                self._end(error)
            else:
                self._send_steps()
            return
        self._in_flight.pop(number, None)
        self._send_steps()  # before anything else: the shards wait for it
        rate = num_tokens / max(found.forward_s, 1e-6)
        self._tokens_per_s += (rate - self._tokens_per_s) * (_HEALTH_FACTOR if self._tokens_per_s else 1.0)
        for phase, seconds in zip(POOLING_PHASES, found.phases_s, strict=False):
            self._metrics.observe("tgi_batch_phase_duration", seconds, phase=phase)
        for place, unit in enumerate(units):
            _deliver(unit, found.numbers.get(place))

    def _end(self, failure: BaseException | None) -> None:
        if self._is_over.is_set():
            return
        self.failure = failure
        self._is_over.set()
        reason = "the server is stopping" if failure is None else str(failure)
        for _, units in self._in_flight.values():
            for unit in units:
                _fail(unit.entry, reason)
        while self.queue:
            for unit in self.queue.next_step():
                _fail(unit.entry, reason)

    def _show_queue(self) -> None:
        self._metrics.gauge("te_queue_size", self.queue.num_texts)
        self._metrics.gauge("tgi_queue_size", self.queue.num_texts)


def _item(number: int, unit: Unit) -> TextItem:
    tokens, entry = unit.tokens, unit.entry
    return TextItem(
        id=number,
        ids=tokens.ids,
        second_from=tokens.second_from,
        prompt_tokens=tokens.prompt_tokens,
        kind=entry.kind,
        dimensions=entry.dimensions,
        normalize=entry.normalize,
    )


def _deliver(unit: Unit, numbers: Numbers | None) -> None:
    entry = unit.entry
    entry.num_running -= 1
    if numbers is None or numbers.error is not None:
        _fail(entry, "the shards gave no answer" if numbers is None else str(numbers.error))
        return
    entry.answers[unit.place] = numbers
    if len(entry.answers) == len(entry.tokens) and not entry.done.done():
        entry.done.set_result(None)


def _fail(entry: Entry, reason: str) -> None:
    """Fail a request by its first text."""
    if not entry.done.done():
        entry.done.set_exception(failed(reason))
