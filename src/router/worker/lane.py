"""A queue of blocking jobs with threads of its own: cheap jobs before dear ones, and nothing for callers that left.

Jobs that may take long get another lane than the short ones: a job that runs is never interrupted by the queue.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from router.errors import OverloadedError

T = TypeVar("T")

# Costs are bytes or characters of what a job works on. A job of this many may be overtaken for a second.
_COST_OF_A_SECOND = 100_000
MAX_WAITING_COST = 256 << 20
_RETRY_AFTER_S = 10


@dataclass(order=True, slots=True)
class Job(Generic[T]):
    due: float
    number: int
    cost: int = field(compare=False)
    work: Callable[[], T] | None = field(compare=False)
    """None: its caller has left."""
    outcome: Future[T] = field(default_factory=Future, compare=False)


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
        self._waiting: list[Job[Any]] = []
        self._waiting_cost = 0

    async def run(self, cost: int, work: Callable[[], T]) -> T:
        """The result of `work`, or what it raises. A caller that is cancelled before it has begun takes it along.

        Of those that wait the cheapest comes first, but none is overtaken for longer than its own cost is worth.

        Raises OverloadedError for what would wait behind too much, and RuntimeError after `close`.
        """
        job = self.submit(cost, work)
        try:
            return await asyncio.wrap_future(job.outcome)
        finally:
            self._forget(job)

    def submit(self, cost: int, work: Callable[[], T]) -> Job[T]:
        """As `run`, for callers that do not wait."""
        job = Job(time.monotonic() + cost / _COST_OF_A_SECOND, next(self._numbers), cost, work)
        with self._lock:
            if self._waiting_cost and self._waiting_cost + cost > self._max_waiting_cost:
                raise OverloadedError(_RETRY_AFTER_S)
            self._threads.submit(self._run_next)  # takes whichever job is first by then
            heapq.heappush(self._waiting, job)
            self._waiting_cost += cost
        return job

    def close(self, *, wait: bool = False) -> None:
        """Jobs that run go on; those that wait are cancelled. `wait`: for those that run."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for job in waiting:
            job.outcome.cancel()
        self._threads.shutdown(wait=wait, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:  # closed
                return
            job = heapq.heappop(self._waiting)
            work = self._take(job)
        if work is None or not job.outcome.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as error:
            job.outcome.set_exception(error)
        else:
            job.outcome.set_result(result)
        if self._after_each is not None:
            self._after_each()

    def _forget(self, job: Job[Any]) -> None:
        """Lets go of what a job that will not begin works on; its place in the queue is skipped."""
        with self._lock:
            self._take(job)

    def _take(self, job: Job[T]) -> Callable[[], T] | None:
        """The work of a job that has not begun, for whoever comes first."""
        work, job.work = job.work, None
        if work is not None:
            self._waiting_cost -= job.cost
        return work


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
