"""The one thread that touches the device, and the order of its calls."""

# A job is submitted and then collected: `submit` enqueues device work and returns `collect`, which waits for the device
# and does the host's share (text, stop decisions). On an asynchronous device the next job may be submitted before the
# last one is collected; the job itself says whether it allows that. While the device works on a job, the thread waits
# for the next one as well as for the end: the next job is sent after an answer, so it is never there already.
#
# Jobs run strictly in the order of their numbers, whatever order they arrive in, so that ranks can never diverge. Knows
# nothing of models or protobuf.

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from model_server.errors import FatalError, RequestError

T = TypeVar("T")

# A number that does not come within this time will not come: the router has lost a call.
GAP_LIMIT_S = 10.0

# How often a submitted job is asked whether it is over: its answer may be late by this much.
LOOK_EVERY_S = 50e-6


class Job(Generic[T]):
    """Work for the device thread."""

    def __init__(
        self,
        submit: Callable[[], Callable[[], T]],
        overlaps: Callable[[], bool] = lambda: False,
        is_over: Callable[[], bool] = lambda: True,
    ) -> None:
        # Runs on the device thread and returns `collect`.
        self.submit = submit
        # Asked while an earlier job is not collected: may this one be submitted before?
        self.overlaps = overlaps
        # Asked while no other job has come: need `collect` not wait, or could nothing be submitted meanwhile?
        self.is_over = is_over
        self.future: Future[T] = Future()


def whole(work: Callable[[], T]) -> Job[T]:
    """Make a job that is only submitted."""

    def submit() -> Callable[[], T]:
        result = work()
        return lambda: result

    return Job(submit)


class DeviceThread:
    """Runs jobs one after another on its own thread."""

    def __init__(
        self,
        enter: Callable[[], Any],
        on_fatal: Callable[[BaseException], None],
        is_fatal: Callable[[BaseException], bool],
        gap_limit_s: float = GAP_LIMIT_S,
        most_pending: int = 1,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._enter = enter
        self._on_fatal = on_fatal
        self._is_fatal = is_fatal
        self._gap_limit_s = gap_limit_s
        self._most_pending = most_pending
        self._look_every_s = look_every_s
        self._wake = threading.Condition()
        self._waiting: list[tuple[int, int, Job[Any]]] = []
        self._arrivals = itertools.count()
        self._expected = 0
        self._stopping = False
        self._pending: deque[tuple[Job[Any], Callable[[], Any]]] = deque()  # the oldest first
        self._taken: Job[Any] | None = None  # out of the queue, and not pending yet
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enqueue(self, job: Job[T], sequence: int) -> Future[T]:
        """Queue the job with this number; cancelling the future does not cancel work that other ranks run."""
        with self._wake:
            if self._stopping:
                job.future.set_exception(FatalError("the shard is stopping"))
                return job.future
            if any(sequence == waiting for waiting, _, _ in self._waiting):
                job.future.set_exception(RequestError(f"call number {sequence} arrived twice"))
            elif sequence < self._expected:
                job.future.set_exception(
                    RequestError(f"call number {sequence} arrived late: the next in order is {self._expected}")
                )
            else:
                heapq.heappush(self._waiting, (sequence, next(self._arrivals), job))
            self._wake.notify()
        return job.future

    def look(self) -> None:
        """Ask a submitted job whether it is over; on any thread."""
        with self._wake:
            self._wake.notify()

    def reset(self, sequence: int) -> None:
        """Start counting at a new router's `sequence`, and refuse what waits."""
        with self._wake:
            for _, _, job in self._waiting:
                _fail(job, RequestError("another router took over"))
            self._waiting.clear()
            self._expected = sequence
            self._wake.notify()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Finish the running job, refuse the rest, and return whether the thread ended in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _next_job(self, pending: Job[Any] | None) -> Job[Any] | None:
        """Return the next job in order; None if the pending one is over first, or the thread is to end."""
        deadline: float | None = None
        with self._wake:
            while not self._stopping:
                if self._waiting and self._waiting[0][0] == self._expected:
                    self._expected += 1
                    return heapq.heappop(self._waiting)[2]
                if pending is not None:
                    if _is_over(pending):
                        return None
                    self._wake.wait(self._look_every_s)
                    continue
                if not self._waiting:
                    deadline = None
                    self._wake.wait()
                    continue
                deadline = deadline or time.monotonic() + self._gap_limit_s
                if not self._wake.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise FatalError(
                        f"call number {self._expected} did not arrive within {self._gap_limit_s:g} s of a later one"
                    )
        return None

    def _run(self) -> None:
        try:
            with self._enter():
                self._loop()
        except BaseException as error:
            self._refuse_all(error)
            self._on_fatal(error)
        else:
            self._refuse_all(FatalError("the shard is stopping"))

    def _loop(self) -> None:
        while True:
            job = self._taken = self._next_job(self._pending[0][0] if self._pending else None)
            if job is None:
                if self._pending:
                    self._collect_oldest()
                elif self._stopping:
                    return
                continue
            while self._pending and not job.overlaps():
                self._collect_oldest()
            collect = self._submit(job)
            while len(self._pending) >= self._most_pending:
                self._collect_oldest()
            if collect is not None:
                self._pending.append((job, collect))
            # Only `_pending` holds a step, and with it the memory of its requests: not until the next call comes.
            self._taken = job = collect = None

    def _collect_oldest(self) -> None:
        job, collect = self._pending.popleft()
        try:
            result = collect()
        except BaseException as error:
            self._report(job, error)
            return
        if not job.future.cancelled():
            job.future.set_result(result)

    def _submit(self, job: Job[Any]) -> Callable[[], Any] | None:
        try:
            return job.submit()
        except BaseException as error:
            self._report(job, error)
            return None

    def _report(self, job: Job[Any], error: BaseException) -> None:
        _fail(job, error)
        if self._is_fatal(error):
            raise error

    def _refuse_all(self, error: BaseException) -> None:
        with self._wake:
            self._stopping = True
            waiting = [job for _, _, job in self._waiting]
            self._waiting.clear()
            waiting += [job for job, _ in self._pending]
            self._pending.clear()
            if self._taken is not None:
                waiting.append(self._taken)
            self._taken = None
        for job in waiting:
            _fail(job, error)


def _is_over(job: Job[Any]) -> bool:
    try:
        return job.is_over()
    except Exception:
        return True  # collecting it says what is wrong


def _fail(job: Job[Any], error: BaseException) -> None:
    if not job.future.done():
        job.future.set_exception(error)
