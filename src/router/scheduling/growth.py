"""Blocks for requests that outgrow what they reserved, and who yields when there are none (scheduler.md 7.2)."""

from __future__ import annotations

from collections.abc import Callable

from router.scheduling.batch import RunningBatch
from router.scheduling.cache.blocks import BlockAllocator
from router.scheduling.entry import Entry
from router.scheduling.pipeline import Pipeline
from router.scheduling.request_queue import RequestQueue
from router.shards.interface import Growth

# Positions that a request gets at a time: few enough to waste little, enough to be asked for rarely.
_STEP_TOKENS = 256


class Growing:
    """Keeps every running request one position ahead of the next step.

    A request that is preempted goes back to the front of the queue with what it has generated; its next Prefill
    computes all of that again (or finds it in the prefix cache), and its caller notices nothing but the pause.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        queue: RequestQueue,
        pipeline: Pipeline,
        block_size: int,
        on_preempted: Callable[[Entry], None],
    ) -> None:
        self._allocator = allocator
        self._queue = queue
        self._pipeline = pipeline
        self._block_size = block_size
        self._on_preempted = on_preempted

    def prefilled(self, batch: RunningBatch, entry: Entry) -> None:
        """The request's prompt is in the cache: from now on each step fills one more position."""
        allocation = entry.allocation
        assert allocation is not None
        # The token that it just got is counted among its tokens and not written yet.
        entry.num_positions = entry.num_tokens - 1
        if allocation.num_tokens < _num_needed(entry):
            batch.growing[entry.request_id] = entry

    def make_room(self, batch: RunningBatch) -> bool:
        """Get blocks for the next step of the batch. False if an answer that is on its way must be awaited first.

        What was got is in `batch.growth`; requests that had to yield have left the batch, which is dirty then.
        """
        for entry in [e for e in batch.growing.values() if e.prefilled and _is_full(e)]:
            if entry.batch is not batch:
                continue  # it had to yield to one before it
            while not self._extend(batch, entry):
                if self._pipeline:
                    return False  # what ends there may free blocks; and nobody is preempted with calls in flight
                youngest = next(reversed(batch.entries.values()))
                self._preempt(batch, youngest)
                if youngest is entry:
                    break
        return True

    def _extend(self, batch: RunningBatch, entry: Entry) -> bool:
        allocation = entry.allocation
        assert allocation is not None
        needed = _num_needed(entry)
        missing = -(-(needed - allocation.num_tokens) // self._block_size)
        # Rather a little than nothing.
        for num_blocks in (min(missing, max(_STEP_TOKENS // self._block_size, 1)), 1):
            blocks = self._allocator.extend(allocation, num_blocks)
            if blocks is not None:
                batch.growth.append(Growth(entry.request_id, blocks))
                if allocation.num_tokens >= needed:
                    del batch.growing[entry.request_id]
                return True
        return False

    def _preempt(self, batch: RunningBatch, entry: Entry) -> None:
        batch.remove(entry)
        batch.growth = [g for g in batch.growth if g.request_id != entry.request_id]
        batch.dirty = True
        self._pipeline.retire(entry)
        entry.prefilled = False
        entry.num_preemptions += 1
        self._queue.put_first(entry)
        self._on_preempted(entry)


def _num_needed(entry: Entry) -> int:
    """KV positions that it can come to fill in all its lives; the last token is never written."""
    return entry.request.input_length + entry.request.stopping.max_new_tokens - 1


def _is_full(entry: Entry) -> bool:
    allocation = entry.allocation
    assert allocation is not None
    return entry.num_positions >= allocation.num_tokens
