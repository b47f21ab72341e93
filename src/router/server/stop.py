"""The server's end: signals, drain, scheduler's failure."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import uvicorn

from router.api.http.connection import Bounds
from router.api.http.tls_listener import TlsListener
from wire.text.counting import counted

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 2
"""For answers that are written but not read yet, once every request has its answer or its error."""

# The launcher waits a second or two more than the drain itself takes, and five when the shards are gone.
_FLUSH_TIMEOUT_OF_DRAIN_S = 1
_CANCELLED_TIMEOUT_S = 0.5
# A second signal within this time is the same wish: service managers signal every process of the group, and the
# launcher passes its own signal on.
_REPEATED_SIGNAL_S = 0.3
_REPORT_EVERY_S = 5.0
_POLL_EVERY_S = 0.05
# The launcher stops a router whose shards it has killed, of which the running step may not hear: it waits for a node
# that is frozen. The launcher waits for five seconds.
_LOOK_EVERY_S = 1.0


class Server(uvicorn.Server):
    """uvicorn's server without signal handlers, which raise again. Ends after cancelled requests, which may use what is
    closed next.
    """

    def __init__(self, config: uvicorn.Config, bounds: Bounds) -> None:
        super().__init__(config)
        self._bounds = bounds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if sockets is None or (self.config.ssl is None and sockets[0].family != socket.AF_UNIX):
            await super().startup(sockets)
            return
        speaks: Any = self.config.http_protocol_class
        make = functools.partial(
            speaks, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        if self.config.ssl is None:
            loop = asyncio.get_running_loop()
            self.servers = [await loop.create_unix_server(make, sock=one) for one in sockets]
            self.started = True
            return
        held = self.server_state.connections
        listeners = [
            TlsListener(one, make, context=self.config.ssl, bounds=self._bounds, connections=held) for one in sockets
        ]
        self.servers = listeners  # type: ignore[assignment]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if cancelled := set(self.server_state.tasks):
            await asyncio.wait(cancelled, timeout=_CANCELLED_TIMEOUT_S)


class Permits(Protocol):
    """Counts requests that run."""

    @property
    def num_taken(self) -> int: ...


class Serving(Protocol):
    """Takes requests; running ones hold permits."""

    is_draining: bool

    @property
    def permit_pool(self) -> Permits: ...

    def end(self) -> None: ...


class Computing(Protocol):
    """What computes them."""

    @property
    def failure(self) -> BaseException | None: ...

    async def run(self) -> None: ...

    async def end_if_unreachable(self) -> None: ...

    async def close(self) -> None: ...


class Drain:
    """The end: new requests are refused, running ones have a deadline."""

    def __init__(self, server: Server, inference: Serving, scheduler: Computing, timeout_s: int) -> None:
        self.timeout_s = timeout_s
        self._server = server
        self._inference = inference
        self._scheduler = scheduler
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Answer new requests with 503, then close."""
        self._inference.is_draining = True
        self._tasks += map(asyncio.ensure_future, (self._wait_for_requests(), self._watch_shards()))

    def end_at_once(self) -> None:
        """Running requests fail now."""
        self._server.should_exit = self._server.force_exit = True
        self._tasks.append(asyncio.ensure_future(self._scheduler.close()))

    def end_without_scheduler(self) -> None:
        """Wait only for clients that have not read."""
        self.cancel()
        self._inference.end()
        self._server.config.timeout_graceful_shutdown = FLUSH_TIMEOUT_S
        self._server.should_exit = True

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch_shards(self) -> None:
        while True:
            await self._scheduler.end_if_unreachable()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _wait_for_requests(self) -> None:
        loop, permit_pool = asyncio.get_running_loop(), self._inference.permit_pool
        deadline = loop.time() + self.timeout_s
        report_at = loop.time() + _REPORT_EVERY_S
        while permit_pool.num_taken and (now := loop.time()) < deadline:
            if now >= report_at:
                report_at += _REPORT_EVERY_S
                logger.info("Still running: %s", counted(permit_pool.num_taken, "request"))
            await asyncio.sleep(min(deadline - now, _POLL_EVERY_S))
        # Answers that are written but not read yet may use what is left of the time.
        left_s = int(max(0.0, deadline - loop.time()))
        self._server.config.timeout_graceful_shutdown = left_s + _FLUSH_TIMEOUT_OF_DRAIN_S
        self._server.should_exit = True
        await asyncio.sleep(left_s)
        self._inference.end()
        await self._scheduler.close()


async def run_until_stopped(serve: Callable[[Stop], Awaitable[int]]) -> int:
    """Run a server whose end signals decide; return its exit status."""
    me, stop = asyncio.current_task(), Stop()
    assert me is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled, me)
    try:
        return await serve(stop)
    except asyncio.CancelledError:
        if stop.requested:  # while starting
            return 0
        raise


class Stop:
    """Decides the end: first signal drains, second ends, as does the scheduler."""

    def __init__(self) -> None:
        self.requested = False
        self.scheduler_failed = False
        self._is_over = False
        self._signalled_at = -math.inf
        self._drain: Drain | None = None

    def attach(self, drain: Drain) -> None:
        """Set what is to be drained."""
        self._drain = drain
        if self.requested:
            drain.start()

    def signalled(self, main_task: asyncio.Task[int]) -> None:
        now = time.monotonic()
        if now - self._signalled_at < _REPEATED_SIGNAL_S:
            return
        self._signalled_at = now
        if self._drain is None:
            self.requested = True
            main_task.cancel()
        elif not self.requested:
            self.requested = True
            logger.info("stopping: new requests are refused, running ones have %d s to finish", self._drain.timeout_s)
            self._drain.start()
        else:
            logger.warning("stopping at once")
            self._drain.end_at_once()

    def scheduler_ended(self, failure: BaseException | None) -> None:
        """End a server that cannot generate."""
        if self._is_over:
            return
        # A drain closes its scheduler last. If that fails before, this was no orderly stop, and the launcher does not
        # wait until requests in preparation are ready.
        self.scheduler_failed = failure is not None or not self.requested
        if self.scheduler_failed:
            assert self._drain is not None
            self._drain.end_without_scheduler()

    def finished(self) -> None:
        self._is_over = True
        if self._drain is not None:
            self._drain.cancel()
