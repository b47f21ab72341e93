"""One generation: permit, events, end; `Running.close` alone returns the permit."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from router.errors import GenerationError, IncompleteError, RouterError
from router.events import Failed, Finished, Prefilled, TokenGenerated
from router.generation.permits import HeldPermits
from router.generation.timings import Timings
from router.lora.registry import AdapterUse
from router.metrics import Metrics
from router.request import ValidRequest
from router.scheduling.entry import Entry
from router.scheduling.replicas.entry import MovingEntry
from router.tracing import described

logger = logging.getLogger(__name__)

_MAX_SHOWN = 1000  # characters of an output, and those at level debug only


Item = Prefilled | TokenGenerated | Finished


class Running:
    """One generation, to be read to `Finished` or closed."""

    __slots__ = (
        "_account",
        "_adapter",
        "_before",
        "_closed",
        "_ended",
        "_entry",
        "_is_decision",
        "_is_failed",
        "_last_token_at",
        "_metrics",
        "_pool",
        "_request_span",
        "arrived_at",
        "request",
        "request_id",
        "timings",
    )

    def __init__(
        self,
        request: ValidRequest,
        entry: Entry | MovingEntry,
        metrics: Metrics,
        permits: HeldPermits,
        adapter: AdapterUse | None = None,
    ) -> None:
        """Take over an entry, a permit, and its use of an adapter."""
        self.request = request
        self.request_id = permits.request_id
        self.arrived_at = permits.arrived_at
        self.timings: Timings | None = None  # known after `Finished`
        self._entry = entry
        self._adapter = adapter
        self._request_span = permits.request_span
        self._account = None if permits.request_span is None else permits.request_span.account
        self._before = permits.before
        self._is_decision = permits.is_decision
        self._ended: Finished | None = None
        self._pool = permits.hand_over()
        self._metrics = metrics
        self._last_token_at = 0.0
        self._closed = self._is_failed = False
        if not self._is_decision:
            self._count_begin()

    def keep(self) -> None:
        """Count a decision, and its beginning: it is the answer."""
        if self._is_decision:
            self._is_decision = False
            self._count_begin()
            if self._ended is not None:
                self._observe_tokens(1)
                self._count_end(self._ended)

    def _count_begin(self) -> None:
        self._metrics.observe("tgi_request_input_length", self.request.input_length)
        self._metrics.observe("tgi_request_max_new_tokens", min(self.request.stopping.max_new_tokens, 1024))

    async def next_event(self) -> Item:
        """Return the next event, or raise what ends the generation."""
        event = await self._entry.next_event()
        if isinstance(event, TokenGenerated):
            self._observe_tokens(event.step_tokens)
        elif isinstance(event, Finished):
            self._observe_tokens(event.step_tokens)
            self._finish(event)
        elif isinstance(event, Failed):
            if self.request.trace is not None:
                self.request.trace.finish(event.error)
            self._count_finished("error")
            self.close()
            raise self._failure(event.error)
        return event

    def close(self, *, is_dropped: bool = True) -> None:
        """End the generation; idempotent.

        Args:
            is_dropped: Whether that counts, if it was not at its end: not where another part of its request has failed.
        """
        if not self._closed:
            self._closed = True
            self._count_finished("cancelled")
            if not is_dropped:
                self._entry.withdraw()
            self._entry.close()
            self._pool.give_back(1)
            if self._adapter is not None:
                self._adapter.release()
            if self.request.trace is not None:
                self.request.trace.finish()

    def stop(self, event: TokenGenerated, num_tokens: int) -> Finished:
        """End at this token, which completes a stop text."""
        finished = self._entry.answered(event, num_tokens)
        self._finish(finished)
        return finished

    def _observe_tokens(self, count: int) -> None:
        """Observe a step's tokens, each its share of the time; 0: counted already."""
        if self._account is not None and count:
            self._account.generated(count)
        if not count or self._is_decision:
            return
        now = time.monotonic()
        if self._last_token_at:
            each = (now - self._last_token_at) / count
            self._metrics.observe("tgi_request_inter_token_duration", each, count)
        else:
            self._metrics.observe("tgi_request_time_to_first_token_duration", now - self.arrived_at)
            if self._request_span is not None and self._request_span.gen_ai is not None:
                self._request_span.gen_ai.first_chunk(now - self.arrived_at)
        self._last_token_at = now

    def _finish(self, event: Finished) -> None:
        now = time.monotonic()
        timings = Timings(
            total=now - self.arrived_at,
            validation=event.queued_at - self.arrived_at,
            queue=event.started_at - event.queued_at,
            inference=now - event.started_at,
            num_tokens=event.generated_tokens,
        )
        self.timings = timings.after(self._before)
        if self._account is not None and event.cached_tokens:
            self._account.cached(event.cached_tokens)
        self._ended = event
        self.close()
        if not self._is_decision:
            self._count_end(event)

    def _count_finished(self, reason: str) -> None:
        """Count a generation that has no whole answer, once."""
        if self._ended is None and not self._is_failed and not self._is_decision:
            self._is_failed = True
            self._metrics.count("tgi_request_finished", reason=reason)

    def _count_end(self, event: Finished) -> None:
        timings = self.timings
        assert timings is not None
        observe = self._metrics.observe
        self._metrics.count("tgi_request_success")
        self._metrics.count("tgi_request_finished", reason=event.finish_reason)
        self._metrics.count("tgi_prefix_cache_query_tokens", self.request.input_length)
        self._metrics.count("tgi_prefix_cache_hit_tokens", event.cached_tokens)
        observe("tgi_request_duration", timings.total)
        observe("tgi_request_validation_duration", timings.validation)
        observe("tgi_request_queue_duration", timings.queue)
        observe("tgi_request_inference_duration", timings.inference)
        observe("tgi_request_mean_time_per_token_duration", timings.per_token)
        observe("tgi_request_generated_tokens", event.generated_tokens)
        if self._request_span is not None:
            self._request_span.record(self._span_fields(event, timings))
            if self._request_span.gen_ai is not None:
                self._request_span.gen_ai.finished(self.request, event)
            self._request_span.count(
                tokens_in=self.request.input_length,
                tokens_out=event.generated_tokens,
                queue_s=timings.queue,
                inference_s=timings.inference,
            )
        if logger.isEnabledFor(logging.INFO):
            numbers = {
                "input_length": self.request.input_length,
                "generated_tokens": event.generated_tokens,
                "finish_reason": event.finish_reason,
            }
            logger.info("Success", extra=self._log_fields() | numbers)
            logger.debug("Output: %s", event.text[:_MAX_SHOWN], extra={"request_id": self.request_id})

    def _span_fields(self, event: Finished, timings: Timings) -> dict[str, str]:
        """TGI's names."""
        return {
            "parameters": described(self.request),
            "total_time": spell_duration(timings.total),
            "validation_time": spell_duration(timings.validation),
            "queue_time": spell_duration(timings.queue),
            "inference_time": spell_duration(timings.inference),
            "time_per_token": spell_duration(timings.per_token),
            "seed": str(event.seed),
        }

    def _log_fields(self) -> dict[str, object]:
        return {"request_id": self.request_id} if self._request_span is None else self._request_span.log_fields()

    def _failure(self, error: Exception) -> RouterError:
        # The scheduler has counted what it failed itself (err="generation").
        if isinstance(error, IncompleteError):
            self._metrics.count("tgi_request_failure", err="incomplete")
        failure = error if isinstance(error, RouterError) else GenerationError(str(error))
        logger.error("%s", failure, extra=self._log_fields())
        return failure


class Run(Protocol):
    """What can be read like a `Running`."""

    @property
    def request(self) -> ValidRequest: ...
    @property
    def request_id(self) -> str: ...
    @property
    def timings(self) -> Timings | None: ...
    async def next_event(self) -> Item: ...
    def close(self, *, is_dropped: bool = True) -> None: ...


def spell_duration(seconds: float) -> str:
    """Spell as TGI's log: `1.2ms`, `3.4s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{round(seconds * factor, 6):g}{unit}"
    return f"{round(seconds * 1e9):d}ns"
