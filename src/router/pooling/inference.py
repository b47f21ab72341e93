"""What endpoints ask for: permits, tokens, queueing, numbers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from router.errors import UnhealthyError
from router.generation.permits import PermitPool
from router.generation.preparing import Preparing
from router.metrics import PoolingMetrics
from router.pooling.errors import PoolingError, overloaded, too_many
from router.pooling.queue import Entry
from router.pooling.scheduler import PooledScheduler
from router.pooling.texts import Cut, Text, TextTokenizer
from router.shards.pooling import Kind, Numbers
from router.tracing import entered

logger = logging.getLogger(__name__)

_MAX_RETRY_AFTER_S = 120
Job = Literal["embed", "predict"]


@dataclass(frozen=True, kw_only=True)
class PooledLimits:
    """What one request, and all, may ask for."""

    max_concurrent_requests: int
    max_client_batch_size: int
    max_input_tokens: int
    max_batch_tokens: int
    max_batch_size: int | None
    max_queue_tokens: int
    dimensions: int
    auto_truncate: bool


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request's texts."""

    texts: Sequence[Text]
    kind: Kind
    cut: Cut
    # Their field.
    name: str = "inputs"
    dimensions: int = 0
    normalize: bool = True
    is_batch: bool = False
    # Not counted for the limit.
    num_free: int = 0
    # Tokens kept of a pair's second text.
    second_at_most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Numbers of texts; times of the whole request in seconds."""

    numbers: list[Numbers]
    num_tokens: list[int]
    num_characters: int
    total_s: float
    tokenization_s: float
    queue_s: float
    inference_s: float


class PooledInference:
    """What endpoints may ask of such a router."""

    def __init__(
        self,
        scheduler: PooledScheduler,
        tokenizer: TextTokenizer,
        limits: PooledLimits,
        metrics: PoolingMetrics,
        model_names: tuple[str, ...] = (),
    ) -> None:
        self.limits = limits
        self.metrics = metrics
        self.tokenizer = tokenizer
        self.permit_pool = PermitPool(limits.max_concurrent_requests)
        self.is_draining = False
        self._model_names = model_names
        self._preparing = Preparing()
        self._scheduler = scheduler

    async def compute(self, asked: Asked) -> Computed:
        """Compute all texts, or none; cancelling ends it."""
        began = time.monotonic()
        method = "batch" if asked.is_batch else "single"
        job: Job = "predict" if asked.kind == "SCORES" else "embed"
        self.metrics.count("te_request_count", method=method)
        self.check_size(len(asked.texts) - asked.num_free, asked.name)
        span = entered()
        account = None if span is None else span.account
        if account is not None:
            account.check_model(self._model_names)
        if self.is_draining:
            raise UnhealthyError
        if not self.permit_pool.acquire(1):
            raise overloaded(self._retry_after_s)
        try:
            self.metrics.count(f"te_{job}_count", len(asked.texts))
            encoding = self.tokenizer.encode(asked.texts, asked.cut, asked.name, asked.second_at_most)
            tokens = await self._preparing.of(encoding)
            tokenized = time.monotonic()
            num_tokens = [len(one.ids) for one in tokens]
            if self._scheduler.queue and (
                self._scheduler.queue.num_tokens + sum(num_tokens) > self.limits.max_queue_tokens
            ):
                raise overloaded(self._retry_after_s)
            if account is not None:
                account.prompted(sum(num_tokens))
            for length in num_tokens:
                self.metrics.observe("te_request_input_length", length)
            entry = Entry(
                tokens=tokens,
                kind=asked.kind,
                dimensions=asked.dimensions,
                normalize=asked.normalize,
                done=asyncio.get_running_loop().create_future(),
            )
            numbers = await self._scheduler.compute(entry)
        except asyncio.CancelledError:
            self.metrics.count("te_request_failure", err="dropped")
            raise
        finally:
            self.permit_pool.give_back(1)
        ended = time.monotonic()
        started = entry.started_at or ended
        computed = Computed(
            numbers=numbers,
            num_tokens=num_tokens,
            num_characters=sum(text.num_characters for text in asked.texts),
            total_s=ended - began,
            tokenization_s=tokenized - began,
            queue_s=started - entry.queued_at,
            inference_s=ended - started,
        )
        self._count(computed, job, method)
        if span is not None:
            times = {"queue_s": computed.queue_s, "inference_s": computed.inference_s}
            span.count(tokens_in=sum(num_tokens), tokens_out=0, **times)
        return computed

    def end(self) -> None:
        """Fail requests being tokenized: no scheduler is left."""
        self.is_draining = True
        self._preparing.end()

    def check_size(self, count: int, name: str) -> None:
        """Refuse too many texts."""
        if count > self.limits.max_client_batch_size:
            raise too_many(count, self.limits.max_client_batch_size, name)

    def refused(self, error: PoolingError) -> None:
        """Count and log a refusal's kind, without clients' text."""
        asked = entered()
        if asked is not None:
            asked.refused = f"{error.kind} ({error.failure})"
        extra = {} if asked is None else asked.log_fields()
        logger.error("Refused: %s (%s)", error.kind, error.failure, extra=extra)
        logger.debug("%s", error, extra=extra)
        self.metrics.count("te_request_failure", err=error.failure)

    async def is_healthy(self) -> bool:
        return not self.is_draining and await self._scheduler.check_health()

    @property
    def _retry_after_s(self) -> int:
        return max(1, min(math.ceil(self._scheduler.estimated_wait_s), _MAX_RETRY_AFTER_S))

    def _count(self, computed: Computed, job: Job, method: str) -> None:
        self.metrics.count("te_request_success", method=method)
        self.metrics.count(f"te_{job}_success", len(computed.numbers))
        for name, seconds in (
            ("duration", computed.total_s),
            ("tokenization_duration", computed.tokenization_s),
            ("queue_duration", computed.queue_s),
            ("inference_duration", computed.inference_s),
        ):
            self.metrics.observe(f"te_request_{name}", seconds)
            self.metrics.observe(f"te_{job}_{name}", seconds)
