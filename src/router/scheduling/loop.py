"""The one task that drives the shards: send, await the oldest answer, settle, deliver.

It counts `tgi_request_failure` with err="generation" and err="dropped".
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from router.errors import GenerationError, OverloadedError, RouterError, UnhealthyError, ValidationError
from router.limits import ServingLimits, ShardInfo
from router.metrics import Metrics
from router.request import ValidRequest
from router.scheduling.answers import Answers
from router.scheduling.batches import Batches
from router.scheduling.cache.blocks import BlockAllocator, FreeList
from router.scheduling.cache.prefix_cache import PrefixCache
from router.scheduling.cache.states import StateSlots
from router.scheduling.delivery import Delivery, server_error
from router.scheduling.entry import MAX_UNREAD_BYTES, Entry
from router.scheduling.growth import Grower
from router.scheduling.health import HealthCheck, Probe
from router.scheduling.pipeline import Pipeline
from router.scheduling.queue.adapter_slots import AdapterSlots
from router.scheduling.queue.admission import Admission
from router.scheduling.queue.fair import KeyWork
from router.scheduling.queue.request_queue import RequestQueue, content_of
from router.scheduling.sender import Sender
from router.scheduling.step_metrics import StepMetrics
from router.shards.interface import ShardError, Shards, unreachable

log = logging.getLogger(__name__)

DEFAULT_MAX_STEP_S = 60.0


class Scheduler:
    """Owns queue, blocks and batches; `run` ends after `drain`, `close`, or a `failure`."""

    def __init__(
        self,
        shards: Shards,
        info: ShardInfo,
        limits: ServingLimits,
        metrics: Metrics,
        *,
        max_step_s: float = DEFAULT_MAX_STEP_S,
        max_request_s: float | None = None,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        key_work: KeyWork | None = None,
    ) -> None:
        """Take what is served with.

        Args:
            max_step_s: Without answers, shards are stuck.
            max_request_s: A request's whole time.
            max_unread_bytes: Beyond, its reader is too slow.
            key_work: Shared by the replicas of a model.
        """
        self.failure: Exception | None = None
        self.allocator = _allocator(info, limits)
        self._shards = shards
        self._limits = limits
        self._max_step_s = max_step_s
        self._max_request_s = max_request_s
        self._max_unread_bytes = max_unread_bytes
        self._metrics = StepMetrics(metrics)
        self._most_adapters = info.adapter_slots
        self._queue = RequestQueue(
            block_size=info.block_size,
            allocator=self.allocator,
            chunking=info.chunks,
            can_grow=info.can_grow,
            may_share=_may_share(info),
            image_reserve=info.image_reserve,
            decoder_prefix=info.decoder_prefix,
            adapters=None
            if info.adapter_slots is None
            else AdapterSlots(info.adapter_slots, limits.max_waiting_tokens),
            on_dropped=lambda entry: self._metrics.request_failed(entry.dropped_as or "dropped"),
            key_work=key_work,
        )
        self._pipeline = Pipeline(self.allocator)
        self._batches = Batches(self._queue, self._pipeline, self._metrics, info.micro_batches)
        self._probe = Probe()
        grower = None
        if info.can_grow:
            grower = Grower(self.allocator, self._batches, self._pipeline, info.block_size)
        admission = Admission(info, limits, self._queue, self._metrics)
        self._sender = Sender(
            shards, info, self._batches, admission, grower, self._pipeline, self._probe, self._metrics
        )
        self._answers = Answers(info, self._batches, self.allocator, self._probe, self._metrics)
        self._health = HealthCheck(shards, self._ask_probe, lambda: self._batches.num_failures)
        self._wakeup = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._draining = False
        self._ended = False

    def submit(self, request: ValidRequest, known_ids: Sequence[int] = ()) -> Entry:
        """Queue a request, without waiting.

        Args:
            known_ids: Generated elsewhere; it continues behind them.

        Raises:
            UnhealthyError: The loop ends; ValidationError if it never fits (`most_new_tokens`).
        """
        if self._ended or self._draining:
            raise UnhealthyError
        if not self.can_ever_fit(request.input_length, request.stopping.max_new_tokens, len(request.images)):
            raise ValidationError("the request does not fit the server's cache or prefill budget")
        entry = Entry(request, self._batches.caller_left, max_unread_bytes=self._max_unread_bytes)
        entry.generated_ids.extend(known_ids)
        if self._max_request_s is not None:
            entry.end_after(self._max_request_s, self._too_late)
        self._queue.append(entry)
        self._metrics.queue_size(len(self._queue))
        self._wakeup.set()
        return entry

    @property
    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Return adapters of running, and queued requests."""
        running = {entry.request.adapter_id for entry in self._batches.entries}
        queued = {entry.request.adapter_id for entry in self._queue if not entry.closed}
        return running - {None}, queued - {None}  # type: ignore[return-value]  # mypy does not subtract None

    @property
    def queued_by_key(self) -> Mapping[str, int]:
        """Count the waiting requests of each API key that has any."""
        return self._queue.sizes()

    @property
    def most_adapters(self) -> int | None:
        return self._most_adapters

    async def check_health(self) -> bool:
        """Whether shards answer and generate; False if stuck."""
        if self._ended or self._task is None or self._pipeline.is_stalled(self._max_step_s):
            return False
        return await self._health.ask()

    async def end_if_unreachable(self) -> None:
        """Fail if a shard is gone, which a step that waits for another one would not notice."""
        error = None if self._ended else await unreachable(self._shards)
        if error is not None and self._task is not None and not self._ended:
            self._fail(error)
            self._task.cancel()

    async def drain(self) -> None:
        """Refuse new requests, and end after the others."""
        self._draining = True
        self._wakeup.set()
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        self._give_up(None)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def can_ever_fit(self, input_length: int, max_new_tokens: int, num_images: int = 0) -> bool:
        """Whether an idle server could run it."""
        return max_new_tokens <= self.most_new_tokens(input_length, num_images)

    def most_new_tokens(self, input_length: int, num_images: int = 0) -> int:
        """Return an idle server's most tokens; below 0: none."""
        prefill_budget = self._limits.max_batch_prefill_tokens
        return self._queue.most_new_tokens(input_length, prefill_budget, num_images=num_images)

    @property
    def estimated_wait_s(self) -> float:
        """Estimate Retry-After by the queue's drain."""
        return self._batches.drain_rate.wait_s(len(self._queue) + 1)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the queue's requests may have to compute."""
        return sum(entry.num_tokens - entry.num_known for entry in self._queue)

    def num_known(self, request: ValidRequest) -> int:
        """Count the tokens of a prompt that the prefix cache has."""
        if not isinstance(self.allocator, PrefixCache) or request.decoder_input_details:
            return 0
        return self.allocator.match(request.input_ids, request.cache_namespace, content_of(request))

    @property
    def num_running(self) -> int:
        """Requests in a batch."""
        return self._batches.num_running

    async def run(self) -> None:
        """Serve until closed, drained, or `failure`."""
        self._task = asyncio.get_running_loop().create_task(self._serve())
        try:
            await self._task
        except asyncio.CancelledError:
            if not self._ended:  # cancelled by our caller, not by close()
                self._give_up(None)
                raise
        except Exception as error:
            self._fail(error)
        else:
            self._give_up(None)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, ShardError):
            log.error("the scheduler stops after an error: %s", error.detail)
        else:
            log.exception("the scheduler gives up")
        self.failure = error
        self._give_up(error)

    def _too_late(self, entry: Entry) -> RouterError:
        """Return a late request's error; unbegun ones may be retried."""
        if entry.started_at is None:
            return OverloadedError(max(1, math.ceil(self.estimated_wait_s)))
        return GenerationError(f"not finished after {self._max_request_s:g} s")

    async def _serve(self) -> None:
        delivery: Delivery | None = None
        while not self._ended:
            self._wakeup.clear()
            try:
                self._sender.send_calls()
            finally:  # who has ended is in no batch any more: this is the last that it gets
                if delivery is not None:
                    self._answers.deliver(delivery)
                    delivery = None
            self._count_blocks()
            if self._pipeline:
                delivery = self._answers.apply(await self._pipeline.next_answered(self._max_step_s))
                continue
            if self._draining and not self._queue:
                return
            self._metrics.current_batch(0, 0)
            await self._wakeup.wait()

    async def _ask_probe(self) -> bool:
        if self._ended:
            return False
        answer = self._probe.ask()
        self._wakeup.set()
        return await answer

    def _give_up(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            self._batches.give_up(server_error(str(error)) if error is not None else UnhealthyError())
            self._probe.answered(healthy=False)
            self._metrics.queue_size(0)
            self._metrics.current_batch(0, 0)
            self._count_blocks()

    def _count_blocks(self) -> None:
        blocks = self.allocator
        self._metrics.kv_blocks(blocks.num_free, blocks.num_cached, blocks.num_usable)
        if blocks.states is not None:
            self._metrics.states(blocks.states)


def _allocator(info: ShardInfo, limits: ServingLimits) -> BlockAllocator:
    num_blocks = limits.max_batch_total_tokens // info.block_size
    states = StateSlots(info.state_slots, info.state_grid) if info.state_slots else None
    if info.shares_prefixes:
        return PrefixCache(num_blocks, info.block_size, states)
    return FreeList(num_blocks, info.block_size, states, decoder_prefix=info.decoder_prefix)


def _may_share(info: ShardInfo) -> Callable[[ValidRequest], bool]:
    """Return whose tokens are shared; prompt logprobs need whole prompts."""
    if not info.shares_prefixes:
        return lambda request: False
    return lambda request: not request.decoder_input_details
