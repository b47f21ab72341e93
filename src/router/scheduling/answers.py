"""What an answer means for the batches. Synchronous.

After a step: membership is settled, next calls are sent, then tokens delivered, so that waking readers never delays the
device.
"""

from __future__ import annotations

import logging
import time

from router.limits import ShardInfo
from router.scheduling.batch import RunningBatch
from router.scheduling.batches import Batches
from router.scheduling.cache.blocks import BlockAllocator
from router.scheduling.delivery import Delivery, first_tokens, keep_ids, keep_predicted, server_error
from router.scheduling.health import Probe
from router.scheduling.pipeline import Call
from router.scheduling.step_metrics import StepMetrics
from router.shards.interface import PROBE_ID, CachedBatch, ShardError, StepReply

log = logging.getLogger(__name__)


class Answers:
    """Settles what the shards answered."""

    def __init__(
        self,
        info: ShardInfo,
        batches: Batches,
        allocator: BlockAllocator,
        probe: Probe,
        metrics: StepMetrics,
    ) -> None:
        self._keeps_ids = info.shares_prefixes or info.can_grow
        self._batches = batches
        self._allocator = allocator
        self._probe = probe
        self._metrics = metrics

    def apply(self, call: Call) -> Delivery | None:
        """Take a call's answer; return what to deliver after the next calls.

        Raises:
            ShardError: The shards are lost.
        """
        try:
            reply = call.reply.result()
        except ShardError as error:
            if error.fatal:
                raise
            self._settle_failure(call, error)
            return None
        if call.kind in ("prefill", "decode"):
            return self._settle_step(call, reply)
        if call.kind == "filter":
            assert call.batch is not None
            self._settle_batch(call.batch, reply)
            self._metrics.filtered(time.monotonic() - call.could_begin_at)
        elif call.kind == "probe":
            # A row that fails is no failed call: a model without usable scores answers every call.
            self._probe.answered(all(row.error is None for row in reply.rows))
            if reply.batch is not None:
                self._batches.clear((PROBE_ID,))
        return None

    def deliver(self, delivery: Delivery) -> None:
        """Put events into outboxes."""
        call, begun_at = delivery.call, time.monotonic()
        delivery.deliver()
        if delivery.reply.is_empty:
            return
        now = time.monotonic()
        self._metrics.answered(call.kind, delivery.reply, now - call.could_begin_at, now - begun_at)

    def _settle_step(self, call: Call, reply: StepReply) -> Delivery | None:
        batch = call.batch
        assert batch is not None
        self._batches.answered(call.kind)
        if not reply.is_empty:
            self._metrics.computed(call.kind)
        if call.kind == "prefill":
            if batch.into is not None and batch.into.failed:
                # It ran, but under the id of a batch that is being cleared.
                self._batches.put_back(batch)
                return None
            batch = self._batches.prefilled(batch)
        entries = batch.entries  # before a merge moves them
        if self._keeps_ids:
            keep_ids(reply, entries)
        keep_predicted(reply, entries)
        if batch.prefilling:
            self._settle_first_tokens(reply, batch, call.step)
        rows = [(row, entries[row.request_id]) for row in reply.rows if row.request_id in entries]
        for row, entry in rows:
            if len(row.tokens) > 1:
                batch.got_several(entry, len(row.tokens))
            if row.error is not None or row.ended is not None:
                self._batches.ended(batch, entry, failed=row.is_server_at_fault)
        self._settle_batch(batch, reply.batch)
        if reply.batch is not None and any(
            row.error is not None and row.request_id in reply.batch.request_ids for row, _ in rows
        ):
            batch.mark_dirty()  # only one of several ranks knew of the failure: all keep the row until a FilterBatch
        # Some may be preempted before they get their tokens, for a request of any batch.
        readers = dict(entries) if self._batches.any_growing else entries
        return Delivery(call, reply, rows, readers)

    def _settle_first_tokens(self, reply: StepReply, batch: RunningBatch, step: int) -> None:
        """Share cached prompts."""
        for entry in first_tokens(reply, batch.prefilling):
            batch.first_token(entry, step)
            if entry.allocation is not None:
                self._allocator.commit(entry.allocation, entry.written_ids)

    def _settle_batch(self, batch: RunningBatch, cached: CachedBatch | None) -> None:
        """Compare what shards keep with what is wanted."""
        if batch.ended:
            return
        lost = list(batch.entries.values()) if cached is None else batch.update(cached)
        for entry in lost:
            log.error("the shards lost request %d", entry.request_id)
            self._batches.lose(batch, entry, server_error("the shards no longer know this request"))
        if cached is None:
            self._batches.emptied(batch)
        elif not batch.entries:
            batch.compare_size()

    def _settle_failure(self, call: Call, error: ShardError) -> None:
        """Fail exactly the batch's requests, once."""
        if call.kind == "clear":
            log.warning("ClearCache failed: %s", error.detail)
            return
        if call.kind == "probe":
            self._probe.answered(healthy=False)
            self._batches.clear((PROBE_ID,))
            return
        batch = call.batch
        assert batch is not None
        if call.kind != "filter":
            self._metrics.failed(call.kind)
        if call.kind == "prefill":
            self._batches.answered(call.kind)
            if batch.into is not None and batch.into.failed:
                self._batches.put_back(batch)
                return
        if batch.ended:
            return  # a call before it failed, or no request is left
        log.error("%s failed: %s", call.kind, error.detail)
        self._batches.clear(call.batch_ids)
        for failed in (batch.into, batch):
            if failed is None or failed.ended:
                continue
            for entry in self._batches.end(failed, failed=True):
                self._batches.fail(entry, server_error(str(error)))
