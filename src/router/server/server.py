"""From a config to a server that answers, and back: start order, signals, drain, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import ipaddress
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.app_state import Served
from router.api.http.connection import Bounds, Connection
from router.config import RouterConfig
from router.errors import StartupError
from router.generation.inference import Inference
from router.generation.validation import Validator
from router.grammar.checker import GrammarChecker
from router.metrics import CONTENT_TYPE, Metrics
from router.openai.template.template import ChatTemplate
from router.server import descriptors
from router.server.app import create_app
from router.server.startup import Started, connect_and_warm_up
from router.shards.interface import StalledError
from router.text import model_files
from router.text.tokenizer import PromptTokenizer
from wire import phases
from wire.exit_status import STALLED
from wire.tracing import Tracing, TracingError

logger = logging.getLogger(__name__)

# When every request has got its error what is left are clients that do not read. A launcher that has told us to drain
# waits a second or two more than the drain itself takes, and five when the shards are gone.
_LAST_WORDS_S = 2
_LAST_WORDS_OF_DRAIN_S = 1
# A signal again so soon is the same wish: service managers signal everybody, and the launcher asks us to end as well.
_ECHO_S = 0.3
_BACKLOG = 2048
_REPORT_EVERY_S = 5.0
_LOOK_EVERY_S = 0.05
# New objects before a pass over them, and passes before one over the next older generation. A waiting request holds
# about a hundred objects and a pass takes half a microsecond for each, while nothing else is done.
_COLLECTOR_PACE = (20_000, 4, 20)
# The kernel would let megabytes pile up for a client that does not read; so much is plenty for a stream of tokens.
_SEND_BUFFER_BYTES = 128 * 1024


async def serve(config: RouterConfig) -> int:
    """Runs the router; returns the exit status. Raises StartupError before anything listens."""
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    assert me is not None
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled, me)
    try:
        return await _serve(config, stop)
    except asyncio.CancelledError:
        if stop.requested:  # while starting
            return 0
        raise


async def _serve(config: RouterConfig, stop: Stop) -> int:
    with contextlib.ExitStack() as resources:
        tracing = None
        if config.otlp_endpoint is not None:
            tracing = _tracing(config.otlp_endpoint, config.otlp_service_name)
            resources.callback(tracing.close)
        # Bound now, so that a port in use is found before the model is warm; it listens at the very end.
        listener = resources.enter_context(bind(config.hostname, config.listening_port))
        metrics_listener = None
        if config.prometheus_port is not None:
            metrics_listener = resources.enter_context(bind(config.hostname, config.prometheus_port))
        phases.enter(phases.TOKENIZER)
        files = model_files.load(
            config.tokenizer_name,
            revision=config.revision,
            tokenizer_config_path=config.tokenizer_config_path,
            chat_template=config.chat_template,
        )
        tokenizer = PromptTokenizer.from_file(files.tokenizer_json, num_workers=config.validation_workers)
        resources.callback(tokenizer.close)
        chat_template = ChatTemplate(files.templates, files.named_tokens)
        resources.callback(chat_template.close)
        grammars = None if config.disable_grammar_support else GrammarChecker()
        if grammars is not None:
            resources.callback(grammars.close)
        if not files.templates:
            logger.warning("the model has no chat template: chat requests will be refused")
        metrics = Metrics()
        phases.enter(phases.WARM_UP)
        logger.info("Warming up model")
        started = await connect_and_warm_up(
            config,
            metrics,
            max_positions=files.max_positions,
            tokenizer_max_length=files.tokenizer_max_length,
            tracing=tracing,
        )
        try:
            served = _served(config, files, tokenizer, chat_template, grammars, metrics, started)
            return await _answer(config, served, started, stop, listener, metrics_listener, tracing)
        finally:
            await started.scheduler.close()
            await started.shards.close()


def _tracing(endpoint: str, service_name: str) -> Tracing:
    try:
        return Tracing.to_collector(endpoint, service_name)
    except TracingError as error:
        raise StartupError(str(error)) from None


def _served(
    config: RouterConfig,
    files: model_files.ModelFiles,
    tokenizer: PromptTokenizer,
    chat_template: ChatTemplate,
    grammars: GrammarChecker | None,
    metrics: Metrics,
    started: Started,
) -> Served:
    limits = started.limits
    metrics.set_limits(
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        speculate=started.info.speculate,
    )
    validator = Validator(
        tokenizer,
        limits,
        started.info,
        can_ever_fit=started.scheduler.can_ever_fit,
        grammars=grammars,
        max_stop_bytes=config.max_stop_sequence_bytes,
    )
    inference = Inference(
        scheduler=started.scheduler, validator=validator, tokenizer=tokenizer, limits=limits, metrics=metrics
    )
    return Served(
        config=config,
        info=started.info,
        inference=inference,
        chat_template=chat_template,
        model_id=config.tokenizer_name,
        model_sha=files.sha,
        git_sha=os.environ.get("GIT_SHA") or None,
        docker_label=os.environ.get("DOCKER_LABEL") or None,
    )


async def _answer(
    config: RouterConfig,
    served: Served,
    started: Started,
    stop: Stop,
    listener: socket.socket,
    metrics_listener: socket.socket | None,
    tracing: Tracing | None,
) -> int:
    """Serves until a signal or the scheduler's end. Raises StartupError if somebody else listens by now."""
    phases.enter(phases.BINDING)
    for each in filter(None, (listener, metrics_listener)):
        _listen(each)
    app = create_app(served, api_key=config.api_key, allow_origins=config.cors_allow_origin, tracing=tracing)
    server = _Server(_uvicorn_config(app, config, config.graceful_termination_timeout + _LAST_WORDS_S))
    scheduling = asyncio.create_task(started.scheduler.run())
    stop.attach(server, served.inference, started, config.graceful_termination_timeout)
    scheduling.add_done_callback(lambda _: stop.scheduler_ended(started))
    metrics_server = None
    if metrics_listener is not None:
        metrics_server = _Server(_uvicorn_config(_metrics_app(served.inference.metrics), config, 1))
        metrics_task = asyncio.create_task(metrics_server.serve([metrics_listener]))
    logger.info("Connected")
    phases.enter(phases.READY)
    _calm_collector()
    try:
        await server.serve([listener])
    finally:
        stop.finished()
        if metrics_server is not None:
            metrics_server.should_exit = True
            await metrics_task
    if not stop.scheduler_failed:
        return 0
    return STALLED if isinstance(started.scheduler.failure, StalledError) else 1


class Stop:
    """Ends the server: at the first signal with a drain, at the second one at once, or when the scheduler is gone."""

    def __init__(self) -> None:
        self.requested = False
        self.scheduler_failed = False
        self._is_over = False
        self._signalled_at = -math.inf
        self._server: _Server | None = None
        self._inference: Inference | None = None
        self._started: Started | None = None
        self._timeout_s = 0
        self._tasks: list[asyncio.Task[None]] = []

    def attach(self, server: _Server, inference: Inference, started: Started, timeout_s: int) -> None:
        """From now on there is something to drain."""
        self._server, self._inference, self._started, self._timeout_s = server, inference, started, timeout_s
        if self.requested:
            self._drain()

    def signalled(self, main_task: asyncio.Task[int]) -> None:
        now = time.monotonic()
        if now - self._signalled_at < _ECHO_S:
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
            self._tasks.append(asyncio.ensure_future(self._fail_the_rest()))

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
        self._server.config.timeout_graceful_shutdown = _LAST_WORDS_S
        self._server.should_exit = True

    def finished(self) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    def _drain(self) -> None:
        """Whoever comes now is told to go elsewhere, which says more than a closed door; the last one out closes it."""
        assert self._inference is not None
        self._inference.is_draining = True
        self._tasks.append(asyncio.ensure_future(self._wait_for_requests()))

    async def _wait_for_requests(self) -> None:
        assert self._inference is not None and self._server is not None
        loop, permits = asyncio.get_running_loop(), self._inference.permits
        deadline = loop.time() + self._timeout_s
        report_at = loop.time() + _REPORT_EVERY_S
        while permits.num_taken and (now := loop.time()) < deadline:
            if now >= report_at:
                report_at += _REPORT_EVERY_S
                logger.info("%d requests are still running", permits.num_taken)
            await asyncio.sleep(min(deadline - now, _LOOK_EVERY_S))
        # Answers that are written but not read yet may use what is left of the time.
        left_s = int(max(0.0, deadline - loop.time()))
        self._server.config.timeout_graceful_shutdown = left_s + _LAST_WORDS_OF_DRAIN_S
        self._server.should_exit = True
        await asyncio.sleep(left_s)
        await self._fail_the_rest()

    async def _fail_the_rest(self) -> None:
        assert self._started is not None
        await self._started.scheduler.close()


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would die of the signal that it has just obeyed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: ASGIApp, config: RouterConfig, timeout_s: int) -> uvicorn.Config:
    bounds = Bounds(
        max_connections=descriptors.allow(config.max_connections),
        head_s=config.head_timeout_seconds,
        body_s=config.body_timeout_seconds,
        stalled_s=config.stalled_client_seconds,
    )
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
    )


def _calm_collector() -> None:
    """Looks for cycles more seldom, and never again in what exists by now.

    With thousands of requests under way the collector's default pace costs more than the requests themselves: a full
    pass walks every module and every waiting request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_PACE)


def bind(hostname: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises StartupError that names the port."""
    try:
        address = ipaddress.ip_address(hostname)
    except ValueError:
        logger.warning("Invalid hostname %r, defaulting to 0.0.0.0", hostname)
        address = ipaddress.ip_address("0.0.0.0")
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # inherited by its connections
    try:
        listener.bind((str(address), port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(address, port, error) from None
    listener.setblocking(False)
    return listener


def _listen(listener: socket.socket) -> None:
    """Two sockets may be bound to one port until one of them listens; asyncio's loop would say nothing of the other's
    failure. Raises StartupError that names the port."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        address, port = listener.getsockname()[:2]
        raise _cannot_listen(address, port, error) from None


def _cannot_listen(address: object, port: int, error: OSError) -> StartupError:
    return StartupError(f"cannot listen on {address}:{port}: {error.strerror}")


def _metrics_app(metrics: Metrics) -> ASGIApp:
    """Answers every path with the metrics."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        body = metrics.render()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer
