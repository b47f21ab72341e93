"""A queue of blocking jobs with threads of its own: cheap jobs first, and none for callers that disconnected.

Jobs that may take long get another lane than the short ones: a job that runs is never interrupted by the queue.
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
    """`work` is None as soon as it has begun, or its caller has disconnected."""

    __slots__ = ("cost", "settle", "work")

    def __init__(
        self, cost: int, work: Callable[[], Any], settle: Callable[[Any, BaseException | None], object]
    ) -> None:
        """`settle`: called once with the result or what was raised."""
        self.cost = cost
        self.work: Callable[[], Any] | None = work
        self.settle = settle


class Lane:
    """Runs jobs in `num_threads` threads, which are started when they are needed."""

    def __init__(
        self,
        name: str,
        *,
        num_threads: int = 1,
        max_waiting_cost: int = MAX_WAITING_COST,
        after_each: Callable[[], None] | None = None,
    ) -> None:
        """`max_waiting_cost`: of all jobs that have not begun; one job may always wait.

        `after_each`: called in the job's thread when its caller has the outcome.
        """
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_waiting_cost = max_waiting_cost
        self._after_each = after_each
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, _Job]] = []  # due, number
        self._waiting_cost = 0

    async def run(self, cost: int, work: Callable[[], T]) -> T:
        """The result of `work`, or what it raises. A caller that is cancelled before it has begun takes it along.

        The cheapest waiting job comes first, but no job is overtaken for longer than its own cost is worth.

        Raises OverloadedError for what would wait behind too much, and RuntimeError after `close`.
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
        """As `run`, for callers that want no outcome."""
        self._queue(_Job(cost, work, lambda result, error: None))

    def close(self, *, wait: bool = False) -> None:
        """Jobs that run continue; those that wait are cancelled. `wait`: for those that run."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, _, job in waiting:
            if job.work is not None:
                job.settle(None, asyncio.CancelledError())
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
            work = self._take(job)
        if work is None:
            return
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        job.settle(result, error)
        del job, result, error  # as in `run`
        if self._after_each is not None:
            self._after_each()

    def _forget(self, job: _Job) -> None:
        """Lets go of what a job that will not begin works on; its place in the queue is skipped."""
        with self._lock:
            self._take(job)

    def _take(self, job: _Job) -> Callable[[], Any] | None:
        """The work of a job that has not begun, for the first thread that is free."""
        work, job.work = job.work, None
        if work is not None:
            self._waiting_cost -= job.cost
        return work


def _settle_soon(
    loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
    """From another thread."""
    loop.call_soon_threadsafe(_settle, outcome, result, error)


def _settle(outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if outcome.done():  # its caller has disconnected
        return
    if error is None:
        outcome.set_result(result)
    elif isinstance(error, asyncio.CancelledError):
        outcome.cancel()
    else:
        outcome.set_exception(error)


class Lanes:
    """A lane for ordinary jobs and one for those that cost more than `large_from`, in a thread of its own."""

    def __init__(
        self, name: str, *, large_from: int, num_threads: int = 1, after_large: Callable[[], None] | None = None
    ) -> None:
        """`num_threads`: for ordinary jobs. `after_large`: see `after_each` of Lane."""
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
