"""Answers requests until the end."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import socket
import sys

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.http.connection import Bounds, Connection
from router.config import RouterConfig
from router.metrics import CONTENT_TYPE, Metrics
from router.server.root_path import RootPath
from router.server.sockets import allow_connections, listen
from router.server.stop import FLUSH_TIMEOUT_S, Computing, Drain, Server, Serving, Stop
from router.shards.interface import StalledError
from wire import phases
from wire.exit_status import STALLED

logger = logging.getLogger(__name__)

# New objects before a pass over them, and passes before one over the next older generation. A waiting request holds
# about a hundred objects and a pass takes half a microsecond for each, while nothing else is done.
_COLLECTOR_THRESHOLDS = (20_000, 4, 20)

# For how long a thread that parses a large body keeps the interpreter from the event loop, which asks for it again at
# each of its callbacks. Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.001


async def serve_application(
    app: ASGIApp,
    config: RouterConfig,
    inference: Serving,
    scheduler: Computing,
    stop: Stop,
    listener: socket.socket,
    metrics_listener: socket.socket | None,
    metrics: Metrics,
) -> int:
    """Serve until a signal or the scheduler's end."""
    phases.enter(phases.BINDING)
    for each in filter(None, (listener, metrics_listener)):
        listen(each)
    bounds = _bounds(config)
    if config.root_path is not None:
        app = RootPath(app, config.root_path)
    timeout_s = config.graceful_termination_timeout + FLUSH_TIMEOUT_S
    server = Server(_uvicorn_config(app, config, timeout_s, bounds, with_tls=True), bounds)
    scheduling = asyncio.create_task(scheduler.run())
    stop.attach(Drain(server, inference, scheduler, config.graceful_termination_timeout))
    scheduling.add_done_callback(lambda _: stop.scheduler_ended(scheduler.failure))
    metrics_server = None
    if metrics_listener is not None:
        metrics_server = Server(_uvicorn_config(_metrics_app(metrics), config, 1, bounds), bounds)
        metrics_task = asyncio.create_task(metrics_server.serve([metrics_listener]))
    logger.info("Connected")
    phases.enter(phases.READY)
    _slow_down_garbage_collector()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        await server.serve([listener])
    finally:
        stop.finished()
        if metrics_server is not None:
            metrics_server.should_exit = True
            await metrics_task
    if not stop.scheduler_failed:
        return 0
    failure = scheduler.failure
    # After all that this has led to: the last error is what the launcher gives as the reason.
    logger.error("the scheduler has stopped: %s", failure)
    return STALLED if isinstance(failure, StalledError) else 1


def _bounds(config: RouterConfig) -> Bounds:
    return Bounds(
        max_connections=allow_connections(config.max_connections),
        head_s=config.head_timeout_seconds,
        body_s=config.body_timeout_seconds,
        stalled_s=config.stalled_client_seconds,
    )


def _uvicorn_config(
    app: ASGIApp, config: RouterConfig, timeout_s: int, bounds: Bounds, *, with_tls: bool = False
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=functools.partial(Connection, bounds=bounds),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.keep_alive_seconds,
        timeout_graceful_shutdown=timeout_s,
        ssl_certfile=config.ssl_certfile if with_tls else None,
        ssl_keyfile=config.ssl_keyfile if with_tls else None,
    )


def _slow_down_garbage_collector() -> None:
    """Collect less often, and never what exists: full passes cost more than thousands of requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


def _metrics_app(metrics: Metrics) -> ASGIApp:
    """Answers every path with the metrics."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        body = metrics.render()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer
