"""A queue of blocking jobs with threads: cheap ones first, disconnected callers' none. Running jobs are not
interrupted.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from router.errors import OverloadedError

T = TypeVar("T")

# Costs are bytes or characters of what a job works on. A job of this many may be overtaken for a second.
_COST_OF_A_SECOND = 100_000
MAX_WAITING_COST = 256 << 20
RETRY_AFTER_S = 10


class _Job:
    """A job; `work` None once begun or disconnected."""

    __slots__ = ("cost", "resolve", "work")

    def __init__(
        self, cost: int, work: Callable[[], Any], resolve: Callable[[Any, BaseException | None], object]
    ) -> None:
        """Take work; `resolve` gets its result once."""
        self.cost = cost
        self.work: Callable[[], Any] | None = work
        self.resolve = resolve


class Lane:
    """Runs jobs in `num_threads`, started when needed."""

    def __init__(
        self,
        name: str,
        *,
        num_threads: int = 1,
        max_waiting_cost: int = MAX_WAITING_COST,
        after_each: Callable[[], None] | None = None,
    ) -> None:
        """Bound waiting jobs' cost; `after_each` runs behind each outcome."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_waiting_cost = max_waiting_cost
        self._after_each = after_each
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, _Job]] = []  # due, number
        self._waiting_cost = 0

    async def run(self, cost: int, work: Callable[[], T]) -> T:
        """Run `work`; cancelling drops it unbegun. Cheap jobs first, but overtaking is bounded by cost.

        Raises:
            OverloadedError: Too much waits; RuntimeError after `close`.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        job = _Job(cost, work, partial(_settle_soon, loop, outcome))
        self._queue(job)
        try:
            return await outcome
        finally:
            if job.work is not None:
                self._forget(job)
            # An exception refers to this frame by its traceback: were the frame to refer to it in turn, what the job
            # worked on would be kept until the garbage collector comes.
            del outcome, job

    def submit(self, cost: int, work: Callable[[], object]) -> None:
        """Run without an outcome."""
        self._queue(_Job(cost, work, lambda result, error: None))

    def close(self, *, wait: bool = False) -> None:
        """Cancel waiting jobs; `wait` for running ones."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, _, job in waiting:
            if job.work is not None:
                job.resolve(None, asyncio.CancelledError())
        self._threads.shutdown(wait=wait, cancel_futures=True)

    def _queue(self, job: _Job) -> None:
        with self._lock:
            if self._waiting_cost and self._waiting_cost + job.cost > self._max_waiting_cost:
                raise OverloadedError(RETRY_AFTER_S)
            self._threads.submit(self._run_next)  # takes whichever job is first by then
            due = time.monotonic() + job.cost / _COST_OF_A_SECOND
            heapq.heappush(self._waiting, (due, next(self._numbers), job))
            self._waiting_cost += job.cost

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:  # closed
                return
            _, _, job = heapq.heappop(self._waiting)
            work = self._pop_work(job)
        if work is None:
            return
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        job.resolve(result, error)
        del job, result, error  # as in `run`
        if self._after_each is not None:
            self._after_each()

    def _forget(self, job: _Job) -> None:
        """Drop an unbegun job's work; its place is skipped."""
        with self._lock:
            self._pop_work(job)

    def _pop_work(self, job: _Job) -> Callable[[], Any] | None:
        """Take a job's work for a free thread."""
        work, job.work = job.work, None
        if work is not None:
            self._waiting_cost -= job.cost
        return work


def _settle_soon(
    loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
    """From another thread."""
    loop.call_soon_threadsafe(_resolve, outcome, result, error)


def _resolve(outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if outcome.done():  # its caller has disconnected
        return
    if error is None:
        outcome.set_result(result)
    elif isinstance(error, asyncio.CancelledError):
        outcome.cancel()
    else:
        outcome.set_exception(error)


class Lanes:
    """One lane for ordinary jobs, one for those over `large_from`."""

    def __init__(
        self, name: str, *, large_from: int, num_threads: int = 1, after_large: Callable[[], None] | None = None
    ) -> None:
        self.ordinary = Lane(name, num_threads=num_threads)
        self.large = Lane(f"{name}-large", after_each=after_large)
        self._large_from = large_from

    async def run(self, cost: int, work: Callable[[], T]) -> T:
        """See Lane."""
        lane = self.large if cost > self._large_from else self.ordinary
        return await lane.run(cost, work)

    def close(self) -> None:
        """See Lane."""
        self.ordinary.close()
        self.large.close()
