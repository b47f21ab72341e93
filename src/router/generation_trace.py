"""A generation's spans after validation: `queued`, `infer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wire.tracing import Tracing, end

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class GenerationTrace:
    """The spans after validation, carried with the request."""

    __slots__ = ("_infer", "_parent", "_queued", "_tracing")

    def __init__(self, tracing: Tracing, parent: Span) -> None:
        self._tracing = tracing
        self._parent = parent
        self._queued: Span | None = tracing.start("queued", parent=parent)
        self._infer: Span | None = None

    def batched(self) -> Span:
        """Start `infer` at its first batch."""
        self._end_queued()
        if self._infer is None:
            self._infer = self._tracing.start("infer", parent=self._parent)
        return self._infer

    def finish(self, error: BaseException | None = None) -> None:
        """End the spans; idempotent."""
        if self._queued is not None:
            self._end_queued(error)
        elif self._infer is not None and self._infer.is_recording():
            end(self._infer, error)

    def _end_queued(self, error: BaseException | None = None) -> None:
        if self._queued is not None:
            end(self._queued, error)
            self._queued = None
