"""Which requests are in a batch on the shards, how the batches follow each other, and how requests leave them."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable

from router.events import Failed
from router.scheduling.batch import RunningBatch
from router.scheduling.entry import Entry
from router.scheduling.pipeline import CallKind, Pipeline
from router.scheduling.queue.request_queue import RequestQueue
from router.scheduling.step_metrics import DrainRate, StepMetrics


class Batches:
    """The batch that runs, and the one that joins it next.

    All fields are written here only: `sender.Sender` and `answers.Answers` say what happened.
    """

    def __init__(self, queue: RequestQueue, pipeline: Pipeline, metrics: StepMetrics) -> None:
        self.running: RunningBatch | None = None
        self.joining: RunningBatch | None = None  # prefilled, or being prefilled, and not merged yet
        self.waiting_tokens = 0  # see `budget.while_running`
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

    # Batches.

    def join(self, batch: RunningBatch) -> None:
        """A new batch, whose Prefill is about to be sent."""
        self.joining = batch

    def answered(self, kind: CallKind) -> None:
        """A Prefill or Decode was answered, or a Prefill has failed."""
        self.waiting_tokens = 1 if kind == "prefill" else self.waiting_tokens + 1

    def prefilled(self, batch: RunningBatch) -> RunningBatch:
        """The batch to which the requests of a batch belong whose Prefill succeeded."""
        running = batch.joined()
        if running is None:
            return batch
        assert running is self.running, "a batch lasts as long as a Prefill joins it"
        self.joining = None
        running.absorb(batch)
        return running

    def merge(self) -> tuple[int, ...]:
        """The joining batch becomes the running one or a part of it. Returns the ids that the next Decode names."""
        joining, self.joining = self.joining, None
        assert joining is not None
        if self.running is None:
            self.running = joining
            return (joining.batch_id,)
        ids = (self.running.batch_id, joining.batch_id)
        self.running.absorb(joining)
        return ids

    def emptied(self, batch: RunningBatch) -> None:
        """The shards keep nothing of this batch, except for the requests of a Prefill that joins it."""
        if self.joining is None or self.joining.into is not batch:
            self.end(batch)

    def end(self, batch: RunningBatch, *, failed: bool = False) -> list[Entry]:
        """Nothing more is sent for this batch. Returns the requests that were in it."""
        if self.running is batch:
            self.running = None
        if self.joining is batch:
            self.joining = None
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
        """A request ends whose client has disconnected."""
        entry.drop()
        self._metrics.request_failed("dropped")

    def _current(self) -> list[RunningBatch]:
        return [batch for batch in (self.running, self.joining) if batch is not None]

    def _batch_of(self, entry: Entry) -> RunningBatch | None:
        return next((batch for batch in self._current() if entry.request_id in batch.entries), None)
