"""Which requests are in a batch on the shards, how the batches follow each other, and how requests leave them.

The stages of a pipeline work on several micro-batches side by side, each on another one; without stages there is one.
"""

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
    """The batch that runs, and the one that joins it next: prefilled, or being prefilled, and not merged yet. Written
    by `Batches` only."""

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
    """The micro-batches: which requests are in each.

    All fields are written here only: `sender.Sender` and `answers.Answers` say what happened.
    """

    def __init__(
        self, queue: RequestQueue, pipeline: Pipeline, metrics: StepMetrics, num_micro_batches: int = 1
    ) -> None:
        """num_micro_batches: one more than there are stages, or 1."""
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
        """Whether a request may come to need more blocks than it holds."""
        return any(one.running.growing for one in self.micro_batches if one.running is not None)

    # Micro-batches.

    @property
    def in_use(self) -> list[MicroBatch]:
        """Those with requests."""
        return [one for one in self.micro_batches if one.num_requests]

    @property
    def smallest_first(self) -> list[MicroBatch]:
        if len(self.micro_batches) == 1:
            return self.micro_batches
        return sorted(self.micro_batches, key=lambda one: one.num_requests)

    def room(self, micro_batch: MicroBatch, num_waiting: int) -> int | None:
        """How many of those who wait may join it, so that all have about as many requests; None: any number.

        Whenever requests wait, there is room in the smallest one that may be used.
        """
        count = len(self.micro_batches)
        if count == 1:
            return None
        total = self.num_running + num_waiting
        if total < (count - 1) * FULL_ROWS:
            count -= 1
        if not micro_batch.num_requests and len(self.in_use) >= count:
            return 0
        return max(-(-total // count) - micro_batch.num_requests, 0)

    def youngest(self) -> tuple[RunningBatch, Entry]:
        """The request that was taken into a running batch last, and the batch."""
        running = [one.running for one in self.micro_batches if one.running is not None and one.running.entries]
        batch = max(running, key=lambda one: next(reversed(one.entries)))
        return batch, next(reversed(batch.entries.values()))

    # Batches.

    def join(self, micro_batch: MicroBatch, batch: RunningBatch) -> None:
        """A new batch, whose Prefill is about to be sent."""
        micro_batch.joining = batch

    def answered(self, kind: CallKind) -> None:
        """A Prefill or Decode was answered, or a Prefill has failed."""
        self.waiting_tokens = 1 if kind == "prefill" else self.waiting_tokens + 1
        self.num_steps += 1

    def prefilled(self, batch: RunningBatch) -> RunningBatch:
        """The batch to which the requests of a batch belong whose Prefill succeeded."""
        running = batch.joined()
        if running is None:
            return batch
        micro_batch = self._micro_batch_of(running)
        assert micro_batch is not None, "a batch lasts as long as a Prefill joins it"
        micro_batch.joining = None
        running.absorb(batch)
        return running

    def merge(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        """The joining batch becomes the running one or a part of it. Returns the ids that the next Decode names."""
        joining, micro_batch.joining = micro_batch.joining, None
        assert joining is not None
        if micro_batch.running is None:
            micro_batch.running = joining
            return (joining.batch_id,)
        ids = (micro_batch.running.batch_id, joining.batch_id)
        micro_batch.running.absorb(joining)
        return ids

    def emptied(self, batch: RunningBatch) -> None:
        """The shards keep nothing of this batch, except for the requests of a Prefill that joins it."""
        micro_batch = self._micro_batch_of(batch)
        if micro_batch is None or micro_batch.joining is None or micro_batch.joining.into is not batch:
            self.end(batch)

    def end(self, batch: RunningBatch, *, failed: bool = False) -> list[Entry]:
        """Nothing more is sent for this batch. Returns the requests that were in it."""
        micro_batch = self._micro_batch_of(batch)
        if micro_batch is not None:
            if micro_batch.running is batch:
                micro_batch.running = None
            if micro_batch.joining is batch:
                micro_batch.joining = None
        return batch.end(failed=failed)

    def put_back(self, batch: RunningBatch) -> None:
        """To the front of the queue with requests that lost their Prefill through no fault of theirs."""
        for entry in reversed(self.end(batch)):
            self._pipeline.retire(entry)
            self._queue.put_first(entry)

    def clear(self, batch_ids: Iterable[int]) -> None:
        """The shards are to forget these batches."""
        self._to_clear.extend(batch_ids)

    def next_to_clear(self) -> int | None:
        """A batch that the shards are to forget; its ClearCache is about to be sent."""
        return self._to_clear.popleft() if self._to_clear else None

    # Requests.

    def caller_left(self, entry: Entry) -> None:
        """Called by `Entry.close`, at any time; acted upon at the next boundary."""
        if entry.done:
            return
        if self._batch_of(entry) is None:
            self._queue.caller_left()
            self._metrics.queue_size(len(self._queue))  # with many it is swept
        else:
            self._left.append(entry)

    def discard_left(self) -> None:
        """Take abandoned requests out of their batch; the FilterBatch follows before the next Decode."""
        for entry in self._left:
            batch = self._batch_of(entry)
            if batch is None or entry.done:
                continue  # it ended in the meantime
            batch.discard(entry)
            self._pipeline.retire(entry)
            self._drop(entry)
        self._left.clear()

    def preempt(self, batch: RunningBatch, entry: Entry) -> None:
        """Back to the front of the queue with a request of a batch: others need its blocks."""
        batch.discard(entry)
        self._pipeline.retire(entry)
        entry.preempted()
        self._queue.put_first(entry)
        self._metrics.preempted()

    def ended(self, batch: RunningBatch, entry: Entry, *, failed: bool) -> None:
        """A request has got its last row, which is yet to be delivered."""
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
        """A request of a batch that continues fails; the shards do not have it."""
        batch.remove(entry)
        self.fail(entry, error)

    def fail(self, entry: Entry, error: Exception) -> None:
        """A request that is in no batch any more ends with `error`."""
        self._pipeline.retire(entry)
        self.num_failures += 1
        if entry.closed:
            self._drop(entry)
            return
        self._metrics.request_failed("generation")
        entry.put(Failed(error))

    def give_up(self, error: Exception) -> None:
        """Nothing is served any more: everything that is left fails with `error`, and nothing is held."""
        entries = [entry for batch in self._current() for entry in self.end(batch)]
        for entry in [*entries, *self._queue.drain()]:
            with contextlib.suppress(Exception):
                self.fail(entry, error)
        self._left.clear()
        self._pipeline.abandon()

    def _drop(self, entry: Entry) -> None:
        """Drop a request whose client has disconnected, or has its answer already."""
        entry.drop()
        if not entry.is_answered:
            self._metrics.request_failed("dropped")

    def _current(self) -> list[RunningBatch]:
        return [batch for one in self.micro_batches for batch in one.batches]

    def _micro_batch_of(self, batch: RunningBatch) -> MicroBatch | None:
        return next((one for one in self.micro_batches if batch is one.running or batch is one.joining), None)

    def _batch_of(self, entry: Entry) -> RunningBatch | None:
        return next((batch for batch in self._current() if entry.request_id in batch.entries), None)
