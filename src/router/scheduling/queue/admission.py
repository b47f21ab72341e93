"""Takes requests for the next Prefill, within budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.limits import ServingLimits, ShardInfo
from router.scheduling.batch import RunningBatch
from router.scheduling.queue import budget
from router.scheduling.queue.request_queue import NextBatch, RequestQueue
from router.scheduling.step_metrics import StepMetrics


class Admission:
    """How many waiting requests join."""

    def __init__(self, info: ShardInfo, limits: ServingLimits, queue: RequestQueue, metrics: StepMetrics) -> None:
        self._chunking = info.chunks
        self._limits = limits
        self._queue = queue
        self._metrics = metrics

    @property
    def has_waiting(self) -> bool:
        """Requests are in the queue."""
        return bool(self._queue)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def next_batch(
        self,
        running: RunningBatch | None,
        waiting_tokens: int,
        last_end_at: float,
        *,
        elsewhere: Sequence[RunningBatch] = (),
        most: int | None = None,
        num_steps: int = 0,
    ) -> NextBatch | None:
        """Return the heads that fit, if any.

        Args:
            elsewhere: Other micro-batches, sharing cache and slots.
            most: Heads; None: any number.
        """
        if not self._queue:
            return None
        batches = [*elsewhere] if running is None else [running, *elsewhere]
        self._queue.start((entry for batch in batches for entry in batch.on_shards), num_steps)
        allowed = self._budget(running, waiting_tokens, last_end_at)
        if allowed.max_size is not None:
            most_at_all = max(allowed.max_size - sum(len(batch.entries) for batch in elsewhere), 0)
            most = most_at_all if most is None else min(most, most_at_all)
        if most is not None:
            allowed = replace(allowed, max_size=most)
        found = self._queue.next_batch(allowed, spare_blocks=sum(len(batch.growing) for batch in batches))
        self._metrics.queue_size(len(self._queue))
        if found is not None:
            self._metrics.admitted(len(found.entries), allowed.reason)
        return found

    def chunk_tokens(self, num_rows: int, last_end_at: float) -> int | None:
        """Return the next step's `chunk_tokens`, as many as shards can do beside other rows."""
        if not self._chunking:
            return None
        prompts = budget.prompts_of_a_step(self._limits, backlog=self._is_backlog(last_end_at))
        return max(min(prompts, self._limits.max_batch_prefill_tokens - (num_rows - 1)), 1)

    def _budget(self, running: RunningBatch | None, waiting_tokens: int, last_end_at: float) -> budget.Budget:
        if running is None:
            return budget.when_idle(self._limits)
        if self._chunking:
            prompt_tokens, current_tokens = running.next_tokens
            return budget.while_running_in_chunks(
                self._limits,
                len(running.entries),
                current_tokens,
                prompt_tokens,
                backlog=self._is_backlog(last_end_at),
            )
        return budget.while_running(self._limits, len(running.entries), waiting_tokens)

    def _is_backlog(self, last_end_at: float) -> bool:
        """Whether many prompts wait, and one has ended since: in a mere burst, longer steps only delay first tokens."""
        many = budget.backlog_tokens(self._limits)
        return many is not None and self._queue.waits_since_before(last_end_at) and self._queue.holds_tokens(many)
