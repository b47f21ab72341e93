"""Which requests are in which batch, and how they leave; a pipeline's stages work on several micro-batches."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator

from router.events import Failed
from router.scheduling.batch import RunningBatch
from router.scheduling.entry import Entry
from router.scheduling.pipeline import CallKind, Pipeline
from router.scheduling.queue.request_queue import RequestQueue
from router.scheduling.step_metrics import DrainRate, StepMetrics

# With fewer requests in each, one micro-batch more than there are stages costs more than it brings: a step of half as
# many rows takes hardly less time. With more, it hides the time between the stages and that of the router.
FULL_ROWS = 64


class MicroBatch:
    """The running batch, and the next to join it."""

    __slots__ = ("joining", "running")

    def __init__(self) -> None:
        self.running: RunningBatch | None = None
        self.joining: RunningBatch | None = None

    @property
    def batches(self) -> list[RunningBatch]:
        return [one for one in (self.running, self.joining) if one is not None]

    @property
    def num_requests(self) -> int:
        return sum(len(batch.entries) for batch in self.batches)


class Batches:
    """The micro-batches, written here only."""

    def __init__(
        self, queue: RequestQueue, pipeline: Pipeline, metrics: StepMetrics, num_micro_batches: int = 1
    ) -> None:
        """Take the number of micro-batches: stages + 1, or 1."""
        self.micro_batches = [MicroBatch() for _ in range(num_micro_batches)]
        self.waiting_tokens = 0  # see `budget.while_running`
        self.num_steps = 0  # Prefills and Decodes answered so far
        self.last_end_at = -math.inf  # when a request ended last, `time.monotonic`
        self.num_failures = 0  # generations that failed so far
        self.drain_rate = DrainRate()
        self._queue = queue
        self._pipeline = pipeline
        self._metrics = metrics
        self._to_clear: deque[int] = deque()  # ids under which the shards may keep rows after an error
        self._left: list[Entry] = []  # closed since the last `discard_left`

    @property
    def num_running(self) -> int:
        """Requests in a batch."""
        return sum(len(batch.entries) for batch in self._current())

    @property
    def entries(self) -> Iterator[Entry]:
        """Requests in a batch."""
        return (entry for batch in self._current() for entry in batch.entries.values())

    @property
    def any_growing(self) -> bool:
        """Whether a request may outgrow its blocks."""
        return any(one.running.growing for one in self.micro_batches if one.running is not None)

    # Micro-batches.

    @property
    def in_use(self) -> list[MicroBatch]:
        return [one for one in self.micro_batches if one.num_requests]

    @property
    def smallest_first(self) -> list[MicroBatch]:
        if len(self.micro_batches) == 1:
            return self.micro_batches
        return sorted(self.micro_batches, key=lambda one: one.num_requests)

    def room(self, micro_batch: MicroBatch, num_waiting: int) -> int | None:
        """Return how many may join, to balance micro-batches; None: any."""
        count = len(self.micro_batches)
        if count == 1:
            return None
        total = self.num_running + num_waiting
        if total < (count - 1) * FULL_ROWS:
            count -= 1
        if not micro_batch.num_requests and len(self.in_use) >= count:
            return 0
        return max(-(-total // count) - micro_batch.num_requests, 0)

    def last_in_turn(self) -> tuple[RunningBatch, Entry]:
        """Return the last admitted of the least urgent requests, and its batch."""
        running = [one.running for one in self.micro_batches if one.running is not None and one.running.entries]
        running.sort(key=lambda one: next(reversed(one.entries)))
        entries = [(one, entry) for one in running for entry in one.entries.values()]
        least_urgent = max(entry.request.priority for _, entry in entries)
        return next(found for found in reversed(entries) if found[1].request.priority == least_urgent)

    # Batches.

    def join(self, micro_batch: MicroBatch, batch: RunningBatch) -> None:
        """Add a batch before its Prefill."""
        micro_batch.joining = batch

    def answered(self, kind: CallKind) -> None:
        """Note an answered Prefill or Decode, or a failed Prefill."""
        self.waiting_tokens = 1 if kind == "prefill" else self.waiting_tokens + 1
        self.num_steps += 1

    def prefilled(self, batch: RunningBatch) -> RunningBatch:
        """Return the batch that a successful Prefill's requests belong to."""
        running = batch.joined()
        if running is None:
            return batch
        micro_batch = self._micro_batch_of(running)
        assert micro_batch is not None, "a batch lasts as long as a Prefill joins it"
        micro_batch.joining = None
        running.absorb(batch)
        return running

    def merge(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        """Merge the joining batch; return the next Decode's ids."""
        joining, micro_batch.joining = micro_batch.joining, None
        assert joining is not None
        if micro_batch.running is None:
            micro_batch.running = joining
            return (joining.batch_id,)
        ids = (micro_batch.running.batch_id, joining.batch_id)
        micro_batch.running.absorb(joining)
        return ids

    def emptied(self, batch: RunningBatch) -> None:
        """Note a batch that shards keep nothing of, except a joining Prefill."""
        micro_batch = self._micro_batch_of(batch)
        if micro_batch is None or micro_batch.joining is None or micro_batch.joining.into is not batch:
            self.end(batch)

    def end(self, batch: RunningBatch, *, failed: bool = False) -> list[Entry]:
        """End a batch; return its requests."""
        micro_batch = self._micro_batch_of(batch)
        if micro_batch is not None:
            if micro_batch.running is batch:
                micro_batch.running = None
            if micro_batch.joining is batch:
                micro_batch.joining = None
        return batch.end(failed=failed)

    def put_back(self, batch: RunningBatch) -> None:
        """Queue requests again that lost their Prefill."""
        for entry in reversed(self.end(batch)):
            self._pipeline.retire(entry)
            self._queue.put_first(entry)

    def clear(self, batch_ids: Iterable[int]) -> None:
        """The shards are to forget these batches."""
        self._to_clear.extend(batch_ids)

    def next_to_clear(self) -> int | None:
        """Return a batch for ClearCache, if any."""
        return self._to_clear.popleft() if self._to_clear else None

    # Requests.

    def caller_left(self, entry: Entry) -> None:
        """Note a disconnected caller, for the next boundary."""
        if entry.done:
            return
        if self._batch_of(entry) is None:
            self._queue.caller_left()
            self._metrics.queue_size(len(self._queue))  # with many it is swept
        else:
            self._left.append(entry)

    def discard_left(self) -> None:
        """Drop abandoned requests before the next Decode."""
        for entry in self._left:
            batch = self._batch_of(entry)
            if batch is None or entry.done:
                continue  # it ended in the meantime
            batch.discard(entry)
            self._pipeline.retire(entry)
            self._drop(entry)
        self._left.clear()

    def preempt(self, batch: RunningBatch, entry: Entry) -> None:
        """Queue a request again, whose blocks others need."""
        batch.discard(entry)
        self._pipeline.retire(entry)
        entry.preempted()
        self._queue.put_first(entry)
        self._metrics.preempted()

    def ended(self, batch: RunningBatch, entry: Entry, *, failed: bool) -> None:
        """End a request before its last row's delivery."""
        if failed:
            self.num_failures += 1
            if not entry.closed:
                self._metrics.request_failed("generation")
        else:
            self.drain_rate.ended()
        self.last_end_at = time.monotonic()
        batch.remove(entry)
        self._pipeline.retire(entry)
        if entry.closed and not entry.done:
            self._drop(entry)

    def lose(self, batch: RunningBatch, entry: Entry, error: Exception) -> None:
        """Fail a request that the shards lack."""
        batch.remove(entry)
        self.fail(entry, error)

    def fail(self, entry: Entry, error: Exception) -> None:
        """Fail a request in no batch."""
        self._pipeline.retire(entry)
        self.num_failures += 1
        if entry.closed:
            self._drop(entry)
            return
        self._metrics.request_failed("generation")
        entry.put(Failed(error))

    def give_up(self, error: Exception) -> None:
        """Fail everything, and hold nothing."""
        entries = [entry for batch in self._current() for entry in self.end(batch)]
        for entry in [*entries, *self._queue.drain()]:
            with contextlib.suppress(Exception):
                self.fail(entry, error)
        self._left.clear()
        self._pipeline.abandon()

    def _drop(self, entry: Entry) -> None:
        """Drop a disconnected or answered request."""
        entry.drop()
        if entry.dropped_as is not None:
            self._metrics.request_failed(entry.dropped_as)

    def _current(self) -> list[RunningBatch]:
        return [batch for one in self.micro_batches for batch in one.batches]

    def _micro_batch_of(self, batch: RunningBatch) -> MicroBatch | None:
        return next((one for one in self.micro_batches if batch is one.running or batch is one.joining), None)

    def _batch_of(self, entry: Entry) -> RunningBatch | None:
        return next((batch for batch in self._current() if entry.request_id in batch.entries), None)
