"""Tracing into a list, for tests inside one process."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from wire.tracing import Tracing


class RecordedSpans:
    """`tracing` writes here; a span appears when it ends."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self._exporter), "test")

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def id_of(span: Any) -> int:
    context = span.get_span_context()
    assert context is not None
    return int(context.span_id)


def parent_of(span: ReadableSpan) -> int:
    """0 for a root."""
    return span.parent.span_id if span.parent is not None else 0


def linked_of(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}
