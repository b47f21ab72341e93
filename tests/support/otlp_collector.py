"""A collector of spans: an OTLP/gRPC receiver inside the test's process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Received:
    """One span, ids as hex; `parent_id` is empty for a root."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    start: int
    end: int
    failed: bool


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """What has arrived so far; `endpoint` is where."""

    endpoint: str = ""
    _spans: list[Received] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _server: Any = None

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self._spans += [_received(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def start(self) -> None:
        """On a free port of 127.0.0.1."""
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def spans(self) -> list[Received]:
        with self._lock:
            return list(self._spans)

    def wait(self, found: Callable[[list[Received]], bool], timeout_s: float = 120.0) -> list[Received]:
        """All spans, once `found` says yes of them. Batches come with a delay."""
        deadline = time.monotonic() + timeout_s
        while not found(spans := self.spans()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not found among {sorted({(s.service, s.name) for s in spans})}")
            time.sleep(0.05)
        return spans


def _received(service: str, span: Any) -> Received:
    return Received(
        service=service,
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_values(span.attributes),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        failed=span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextlib.contextmanager
def otlp_collector() -> Iterator[Collector]:
    """A collector that runs."""
    collector = Collector()
    collector.start()
    try:
        yield collector
    finally:
        collector.stop()
