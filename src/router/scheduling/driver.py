"""What an answer means, and how requests end. Synchronous: `loop.Scheduler` waits, `sending.Sender` sends.

After every answer the same three things happen in this order: membership is settled (who ended), the next calls are
sent, and only then tokens are delivered, so that waking hundreds of readers never delays the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from router.errors import UnhealthyError
from router.events import Failed
from router.limits import ServingLimits, ShardInfo
from router.scheduling.batch import RunningBatch
from router.scheduling.cache.blocks import BlockAllocator
from router.scheduling.delivery import deliver_columns, deliver_row, server_error
from router.scheduling.entry import Entry
from router.scheduling.growth import Growing
from router.scheduling.pipeline import Call, Pipeline
from router.scheduling.request_queue import RequestQueue
from router.scheduling.sending import Sender
from router.scheduling.step_metrics import DrainRate, StepMetrics
from router.scheduling.steps import first_tokens, keep_ids
from router.shards.interface import PROBE_ID, CachedBatch, Row, ShardError, Shards, StepReply

log = logging.getLogger(__name__)


class Driver:
    """The requests in the batches on the shards."""

    def __init__(
        self,
        shards: Shards,
        info: ShardInfo,
        queue: RequestQueue,
        pipeline: Pipeline,
        limits: ServingLimits,
        metrics: StepMetrics,
        allocator: BlockAllocator | None,
        growing: Growing | None,
    ) -> None:
        self.drain_rate = DrainRate()
        self.num_failures = 0  # generations that failed so far
        self._queue = queue
        self._pipeline = pipeline
        self._metrics = metrics
        self._allocator = allocator
        self._growing = growing
        self._run_ahead = info.runs_ahead
        self._keeps_ids = info.shares_prefixes or info.can_grow
        self._sender = Sender(shards, info, queue, pipeline, limits, metrics, growing, self._unsendable)
        self._left: list[Entry] = []  # closed since the last look
        self._probe_answer: asyncio.Future[bool] | None = None

    @property
    def num_running(self) -> int:
        return sum(len(batch.entries) for batch in (self._sender.running, self._sender.joining) if batch is not None)

    def ask_probe(self) -> asyncio.Future[bool]:
        """A one-token generation through the same numbered order as everything else; sent at the next boundary."""
        if self._probe_answer is None:
            self._probe_answer = asyncio.get_running_loop().create_future()
            self._sender.probe_wanted = True
        return self._probe_answer

    def caller_left(self, entry: Entry) -> None:
        """Called by `Entry.close`, at any time; acted upon at the next boundary."""
        if entry.done:
            return
        if entry.batch is None:
            self._queue.caller_left()
            self._metrics.queue_size(len(self._queue))  # with many it is swept
        else:
            self._left.append(entry)

    def give_up(self, error: Exception | None) -> None:
        """The loop is over: everything that is left fails, and nothing is held any more."""
        reason = server_error(str(error)) if error is not None else UnhealthyError()
        batches = [batch for batch in (self._sender.running, self._sender.joining) if batch is not None]
        entries = [entry for batch in batches for entry in batch.entries.values()]
        for batch in batches:
            self._sender.end_batch(batch)
        for entry in [*entries, *self._queue.drain()]:
            with contextlib.suppress(Exception):
                self._fail(entry, reason)
        self._left.clear()
        self._pipeline.abandon()
        self._answer_probe(False)

    def send_calls(self) -> None:
        """Send whatever the rules allow at this boundary: after an answer, or when something arrived while idle."""
        self._drop_left()
        self._sender.send_calls()

    # Answers.

    def apply(self, call: Call) -> None:
        """Take an answered call's answer. Raises `ShardError` if the shards are lost."""
        try:
            reply = call.reply.result()
        except ShardError as error:
            if error.fatal:
                raise
            self._apply_failure(call, error)
            return
        if call.kind in ("prefill", "decode"):
            self._apply_step(call, reply)
        elif call.kind == "filter":
            assert call.batch is not None
            call.batch.num_unanswered -= 1
            self._settle_batch(call.batch, reply)
            now = time.monotonic()
            # Like a step: from when it could begin.
            self._metrics.filtered(now - max(call.sent_at, self._pipeline.last_answer_at))
            self._pipeline.last_answer_at = now
        elif call.kind == "probe":
            # A row that fails is no failed call: a model without usable scores answers every call.
            self._answer_probe(all(row.error is None for row in reply.rows))
            if reply.batch is not None:
                self._sender.to_clear.append(PROBE_ID)

    def _apply_step(self, call: Call, reply: StepReply) -> None:
        batch = call.batch
        assert batch is not None
        answered_at = time.monotonic()
        if call.kind == "prefill":
            batch.num_unanswered -= 1
            self._sender.waiting_tokens = 1
            if batch.into is not None and batch.into.failed:
                # It ran, but under the id of a batch that is being cleared.
                self._sender.put_back(batch)
                return
            batch = self._joined(batch)
        else:
            batch.num_decodes -= 1
            self._sender.waiting_tokens += 1
        entries = batch.entries  # before a merge moves them
        if self._keeps_ids:
            keep_ids(reply, entries)
        if batch.prefilling:
            self._settle_first_tokens(reply, batch)
        rows = [(row, entries[row.request_id]) for row in reply.rows if row.request_id in entries]
        for row, entry in rows:
            self._settle_row(row, entry, batch)
        self._settle_batch(batch, reply.batch)
        if reply.batch is not None and any(
            row.error is not None and row.request_id in reply.batch.request_ids for row, _ in rows
        ):
            batch.dirty = True  # only one of several ranks knew of the failure: all keep the row until they are told
        readers = dict(entries) if batch.growing else entries  # some may have to yield
        try:
            self.send_calls()
        finally:  # who has ended is in no batch any more: this is the last that it hears
            delivered_from = time.monotonic()
            for columns in reply.columns:
                deliver_columns(columns, readers)
            for row, entry in rows:
                deliver_row(row, entry)
        now = time.monotonic()
        self._metrics.answered(
            call.kind, reply, now - max(call.sent_at, self._pipeline.last_answer_at), now - delivered_from
        )
        self._pipeline.last_answer_at = answered_at

    def _joined(self, batch: RunningBatch) -> RunningBatch:
        """The batch that a prefilled one belongs to from now on."""
        running = batch.into
        if running is None:
            return batch
        # The shards keep the running batch's id, also when nothing else was left of it.
        batch.into, batch.batch_id = None, running.batch_id
        self._sender.joining = None
        if running is self._sender.running:
            running.absorb(batch)
            return running
        self._sender.running = batch
        return batch

    def _settle_first_tokens(self, reply: StepReply, batch: RunningBatch) -> None:
        """Prompts that are in the cache now may be shared."""
        for entry in first_tokens(reply, batch.prefilling):
            entry.prefilled = True
            batch.prefilled(entry, entry.request.stopping.max_new_tokens - max(len(entry.generated_ids), 1))
            if entry.allocation is not None and self._allocator is not None:
                self._allocator.commit(
                    entry.allocation, entry.token_ids[: entry.num_tokens - bool(entry.generated_ids)]
                )
            if self._growing is not None:
                self._growing.prefilled(batch, entry)

    def _settle_row(self, row: Row, entry: Entry, batch: RunningBatch) -> None:
        """If this row is its request's last, the request leaves the batch."""
        if row.error is not None:
            self.num_failures += 1
            if not entry.closed:
                self._metrics.request_failed("generation")
        elif row.ended is not None:
            self.drain_rate.ended()
        else:
            return
        self._sender.last_end_at = time.monotonic()
        batch.remove(entry)
        self._pipeline.retire(entry)
        if entry.closed and not entry.done:
            self.dropped(entry)

    def _settle_batch(self, batch: RunningBatch, cached: CachedBatch | None) -> None:
        """What the shards keep against what the router wants."""
        if batch.ended:
            return
        lost = list(batch.entries.values()) if cached is None else batch.update(cached)
        for entry in lost:
            log.error("the shards lost request %d", entry.request_id)
            batch.remove(entry)
            self._fail(entry, server_error("the shards no longer know this request"))
        if cached is None:
            self._sender.end_batch(batch)
        elif not batch.entries or not self._run_ahead:
            # Our shards drop what ends by themselves; a stock shard keeps it until told.
            batch.dirty = batch.size != len(batch.entries)

    def _apply_failure(self, call: Call, error: ShardError) -> None:
        """A call failed and the shards live on: exactly the requests of its batch fail, once."""
        if call.kind == "clear":
            log.warning("ClearCache failed: %s", error.detail)
            return
        if call.kind == "probe":
            self._answer_probe(False)
            self._sender.to_clear.append(PROBE_ID)
            return
        batch = call.batch
        assert batch is not None
        if call.kind != "filter":
            self._metrics.failed(call.kind)
        if call.kind == "prefill":
            self._sender.waiting_tokens = 1
            if batch.into is not None and batch.into.failed:
                self._sender.put_back(batch)
                return
        if batch.ended:
            return  # behind a call that failed before, or nobody is left; its counts are of no use any more
        log.error("%s failed: %s", call.kind, error.detail)
        self._sender.to_clear.extend(call.batch_ids)
        for failed in (batch.into, batch):
            if failed is None or failed.ended:
                continue
            entries = list(failed.entries.values())
            self._sender.end_batch(failed)
            failed.failed = True
            for entry in entries:
                self._fail(entry, server_error(str(error)))

    # Ends of requests.

    def _fail(self, entry: Entry, error: Exception) -> None:
        self._pipeline.retire(entry)
        self.num_failures += 1
        if entry.closed:
            self.dropped(entry)
            return
        self._metrics.request_failed("generation")
        entry.put(Failed(error))

    def _unsendable(self, entry: Entry, error: Exception) -> None:
        self._fail(entry, server_error(str(error)))

    def _drop_left(self) -> None:
        """Take abandoned requests out of their batch; the FilterBatch follows before the next Decode."""
        for entry in self._left:
            batch = entry.batch
            if batch is None or entry.done:
                continue  # it ended in the meantime
            batch.remove(entry)
            batch.dirty = True
            self._pipeline.retire(entry)
            self.dropped(entry)
        self._left.clear()

    def dropped(self, entry: Entry) -> None:
        """Nobody hears of this request's end."""
        entry.done = True
        self._metrics.request_failed("dropped")

    def _answer_probe(self, healthy: bool) -> None:
        if self._probe_answer is not None and not self._probe_answer.done():
            self._probe_answer.set_result(healthy)
        self._probe_answer = None
