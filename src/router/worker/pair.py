"""Two worker processes of a kind: each job is tried in the quick one, then again in the slow one; large ones begin
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial

from router.worker.lane import MAX_WAITING_COST, Lane
from wire.worker.frames import with_limit
from wire.worker.process import WorkerProcess

logger = logging.getLogger(__name__)

QUICK_LIMIT_S = 0.1
LARGE_BYTES = 64 * 1024
# A process stops a job by itself, unless it is inside of a step that cannot be interrupted: then it is replaced.
_GRACE_S = 1.0
# A signal comes to nothing before the process has begun the job.
_INTERRUPT_EVERY_S = 0.1


class WorkerPair:
    """Processes started when needed, the quick one by `warm_up`."""

    def __init__(self, module: str, *, limit_s: float, max_waiting_cost: int = MAX_WAITING_COST) -> None:
        """Bound a job's time, and the slow one's waiting cost."""
        self._limit_s = limit_s
        self.quick = QueuedWorker(module, Lane(f"{module}-quick"))
        self.slow = QueuedWorker(module, Lane(f"{module}-slow", max_waiting_cost=max_waiting_cost))

    async def ask(self, data: bytes) -> bytes:
        """Return the answer; cancelling drops the job, begun or not.

        Raises:
            TimeoutError, WorkerEndedError, OSError: The job or process failed.
            OverloadedError: Too much waits; RuntimeError after `close`.
        """
        if len(data) < LARGE_BYTES:
            try:
                return await self.quick.ask(len(data), lambda: data, min(QUICK_LIMIT_S, self._limit_s))
            except TimeoutError:
                logger.debug("a job of %d bytes is moved to the slow worker process", len(data))
        return await self.slow.ask(max(len(data), LARGE_BYTES), lambda: data, self._limit_s)

    def warm_up(self) -> None:
        """Start the quick process, without waiting."""
        self.quick.warm_up()

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        for worker in (self.quick, self.slow):
            worker.close()


class QueuedWorker:
    """One process and its waiting jobs."""

    def __init__(self, module: str, lane: Lane, arguments: Sequence[str] = ()) -> None:
        self.process = WorkerProcess(module, arguments)
        self._module = module
        self._lane = lane
        self._lock = threading.Lock()
        self.current: object | None = None
        """The job that the process has."""

    async def ask(self, cost: int, make: Callable[[], bytes], limit_s: float) -> bytes:
        """Ask as WorkerPair; `make` frames in the lane's thread, kept until answered."""
        job = object()
        try:
            return await self._lane.run(cost, partial(self._exchange, job, make, limit_s))
        except asyncio.CancelledError:
            self._interrupt(job)
            raise

    def warm_up(self) -> None:
        self._lane.submit(0, self._start)

    def close(self) -> None:
        self.process.kill()
        self._lane.close(wait=True)
        self.process.end()

    def _exchange(self, job: object, make: Callable[[], bytes], limit_s: float) -> bytes:
        with self._lock:
            self.current = job
        try:
            reply = self.process.exchange(with_limit(limit_s, make()), limit_s + _GRACE_S)
        except TimeoutError:
            logger.warning("%s could not be interrupted: replacing its process", self._module)
            raise
        finally:
            with self._lock:
                self.current = None
        if not reply:
            raise TimeoutError
        return reply

    def _start(self) -> None:
        try:
            self.process.start()
        except OSError as error:
            if self.process.is_closed:  # the server stops before it has begun
                return
            logger.error("%s cannot be started: %s", self._module, error)

    def _interrupt(self, job: object) -> None:
        """Interrupt until the process has dropped the job."""
        with self._lock:
            if self.current is not job:
                return
            if (pid := self.process.pid) is not None:
                with contextlib.suppress(ProcessLookupError):  # it is being replaced
                    os.kill(pid, signal.SIGALRM)
        asyncio.get_running_loop().call_later(_INTERRUPT_EVERY_S, self._interrupt, job)
