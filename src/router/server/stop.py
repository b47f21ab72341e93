"""The end of the server: signals, a drain of the running requests, the scheduler's failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator

import uvicorn

from router.generation.inference import Inference
from router.server.startup import Started

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 2
"""For answers that are written but not read yet, once every request has its answer or its error."""

# The launcher waits a second or two more than the drain itself takes, and five when the shards are gone.
_FLUSH_TIMEOUT_OF_DRAIN_S = 1
# A second signal within this time is the same wish: service managers signal every process of the group, and the
# launcher passes its own signal on.
_REPEATED_SIGNAL_S = 0.3
_REPORT_EVERY_S = 5.0
_POLL_EVERY_S = 0.05


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which raise the signal again after an orderly stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Stop:
    """Ends the server: at the first signal with a drain, at the second one at once, or when the scheduler is gone."""

    def __init__(self) -> None:
        self.requested = False
        self.scheduler_failed = False
        self._is_over = False
        self._signalled_at = -math.inf
        self._server: Server | None = None
        self._inference: Inference | None = None
        self._started: Started | None = None
        self._timeout_s = 0
        self._tasks: list[asyncio.Task[None]] = []

    def attach(self, server: Server, inference: Inference, started: Started, timeout_s: int) -> None:
        """From now on there is something to drain."""
        self._server, self._inference, self._started, self._timeout_s = server, inference, started, timeout_s
        if self.requested:
            self._drain()

    def signalled(self, main_task: asyncio.Task[int]) -> None:
        now = time.monotonic()
        if now - self._signalled_at < _REPEATED_SIGNAL_S:
            return
        self._signalled_at = now
        if self._server is None:
            self.requested = True
            main_task.cancel()
        elif not self.requested:
            self.requested = True
            logger.info("stopping: no new requests, %d s for those that run", self._timeout_s)
            self._drain()
        else:
            logger.warning("stopping at once")
            self._server.should_exit = self._server.force_exit = True
            self._tasks.append(asyncio.ensure_future(self._fail_remaining()))

    def scheduler_ended(self, started: Started) -> None:
        """Every request has got its answer or its failure; a server that cannot generate must not stay up."""
        if self._is_over:
            return
        if self.requested:
            # The drain goes on, for those who read their error; but this was no orderly stop.
            self.scheduler_failed = started.scheduler.failure is not None
            return
        self.scheduler_failed = True
        logger.error("the scheduler has ended: %s", started.scheduler.failure)
        assert self._inference is not None and self._server is not None
        self._inference.is_draining = True
        self._server.config.timeout_graceful_shutdown = FLUSH_TIMEOUT_S
        self._server.should_exit = True

    def finished(self) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    def _drain(self) -> None:
        """New requests are answered with 503, which says more than a refused connection; then the server closes."""
        assert self._inference is not None
        self._inference.is_draining = True
        self._tasks.append(asyncio.ensure_future(self._wait_for_requests()))

    async def _wait_for_requests(self) -> None:
        assert self._inference is not None and self._server is not None
        loop, permit_pool = asyncio.get_running_loop(), self._inference.permit_pool
        deadline = loop.time() + self._timeout_s
        report_at = loop.time() + _REPORT_EVERY_S
        while permit_pool.num_taken and (now := loop.time()) < deadline:
            if now >= report_at:
                report_at += _REPORT_EVERY_S
                logger.info("%d requests are still running", permit_pool.num_taken)
            await asyncio.sleep(min(deadline - now, _POLL_EVERY_S))
        # Answers that are written but not read yet may use what is left of the time.
        left_s = int(max(0.0, deadline - loop.time()))
        self._server.config.timeout_graceful_shutdown = left_s + _FLUSH_TIMEOUT_OF_DRAIN_S
        self._server.should_exit = True
        await asyncio.sleep(left_s)
        await self._fail_remaining()

    async def _fail_remaining(self) -> None:
        assert self._started is not None
        await self._started.scheduler.close()
