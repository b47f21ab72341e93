"""A small interface to OpenTelemetry, loaded by `Tracing.to_collector` only.

Spans are exported in batches by a thread: a slow collector costs spans, never time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

Kind = Literal["internal", "server", "client"]
AttributeValue = str | bool | int | float
Metadata = tuple[tuple[str, str], ...]

_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
_EXPORT_TIMEOUT_S = 5.0
_LAST_EXPORT_S = 3.0
_COMPLAIN_EVERY_S = 60.0

current: ContextVar[Span | None] = ContextVar("current", default=None)
"""The span in which the running task works."""


class TracingError(Exception):
    """Tracing was asked for and cannot be had; the text is for the operator."""


def check(endpoint: str | None) -> None:
    """Raises TracingError if spans cannot be sent there: a package is missing, or it is not an address."""
    if endpoint is None:
        return
    if not all(map(_is_installed, _NEEDED)):
        raise TracingError("`--otlp-endpoint` needs OpenTelemetry, which is not installed: pip install 'tercet[trace]'")
    _address(endpoint)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _address(endpoint: str) -> tuple[str, bool]:
    """`host:port` and whether to encrypt. TGI's form is `http://host:port`; a bare `host:port` is taken too."""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_sound = False
    if "@" in endpoint:  # a password would end up in logs: this message is one
        raise TracingError("`--otlp-endpoint` has a name or a password before its host, which is not served")
    if not is_sound or any(character.isspace() for character in endpoint):
        raise TracingError(f"`--otlp-endpoint` {endpoint} is not an address like http://127.0.0.1:4317")
    return parts.netloc if parts.port else f"{parts.netloc.rstrip(':')}:4317", parts.scheme == "https"


class Tracing:
    """Makes and sends all spans, which callers end."""

    def __init__(self, processor: SpanProcessor, service_name: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        from opentelemetry.trace import Link, SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Not the process' global provider: no other library is made to trace.
        resource = Resource.create({SERVICE_NAME: service_name})
        self._provider: TracerProvider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tercet")
        self._kinds = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
        self._link = Link
        self._context_with = set_span_in_context
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, endpoint: str, service_name: str) -> Tracing:
        """Spans go to the OTLP/gRPC collector at `endpoint`. Raises TracingError."""
        check(endpoint)
        address, encrypted = _address(endpoint)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        for name in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).addFilter(_Seldom())
        exporter = OTLPSpanExporter(
            endpoint=("https://" if encrypted else "http://") + address,
            insecure=not encrypted,
            timeout=_EXPORT_TIMEOUT_S,
        )
        return cls(BatchSpanProcessor(exporter, schedule_delay_millis=1000), service_name)

    def start(
        self,
        name: str,
        *,
        kind: Kind = "internal",
        parent: Span | None = None,
        remote: Mapping[str, str] | None = None,
        links: Sequence[Span] = (),
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Span:
        """A started span: below `parent`, else below the `traceparent` of `remote` if that is sound, else a root."""
        from opentelemetry.context import Context

        context = Context()
        if parent is not None:
            context = self._context_with(parent, context)
        elif remote:
            context = self._propagator.extract(remote, context)
        return self._tracer.start_span(
            name,
            context=context,
            kind=self._kinds[kind],
            attributes=attributes,
            links=[self._link(one.get_span_context()) for one in links],
        )

    def metadata(self, span: Span) -> Metadata:
        """What tells the next process about the span: `traceparent`, and `tracestate` where there is one."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._context_with(span))
        return tuple(carrier.items())

    def close(self) -> None:
        """Sends what is left, for at most a few seconds; blocks as long."""
        # A thread of its own, because we cannot limit how long the exporter waits for an unreachable collector.
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_EXPORT_S)


@contextlib.contextmanager
def inside(span: Span) -> Iterator[None]:
    """What runs in the block, and the tasks that it starts, works in `span`."""
    token = current.set(span)
    try:
        yield
    finally:
        current.reset(token)


def end(span: Span, error: BaseException | None = None) -> None:
    """End a span, in an error's case with its type only."""
    if error is not None:
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR, type(error).__name__)
    span.end()


class _Seldom(logging.Filter):
    """Passes one record in a while: a collector that is down would fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _COMPLAIN_EVERY_S
        return True
