"""More blocks for requests, and who is preempted without."""

from __future__ import annotations

from router.scheduling.batch import RunningBatch
from router.scheduling.batches import Batches
from router.scheduling.cache.blocks import BlockAllocator
from router.scheduling.entry import Entry
from router.scheduling.pipeline import Pipeline

# Positions that a request gets at a time: few enough to waste little, enough to be asked for rarely.
_STEP_TOKENS = 256


class Grower:
    """Keeps requests a position ahead of the next step.

    A preempted request is queued first, and computed again; its caller notices only a pause.
    """

    def __init__(self, allocator: BlockAllocator, batches: Batches, pipeline: Pipeline, block_size: int) -> None:
        self._allocator = allocator
        self._batches = batches
        self._pipeline = pipeline
        self._block_size = block_size

    def make_room(self, batch: RunningBatch) -> bool:
        """Get blocks for the next step (`batch.new_blocks`), preempting if need be; False: await an answer."""
        for entry in batch.full:
            if entry.request_id not in batch.entries:
                continue  # preempted for one before it
            while not self._extend(batch, entry):
                if self._pipeline:
                    return False  # what ends there may free blocks; and no request is preempted with calls in flight
                its_batch, last = self._batches.last_in_turn()
                self._batches.preempt(its_batch, last)
                if last is entry:
                    break
        # Drafts are cut to the positions there are; only steps in flight may have used up a request's last ones.
        return all(self._extend(batch, entry) for entry in batch.short) or not self._pipeline

    def _extend(self, batch: RunningBatch, entry: Entry) -> bool:
        allocation = entry.allocation
        assert allocation is not None
        num_before = allocation.num_tokens
        missing = -(-(entry.most_positions - num_before) // self._block_size)
        # Rather one block than none.
        for num_blocks in (min(missing, max(_STEP_TOKENS // self._block_size, 1)), 1):
            blocks = self._allocator.extend(allocation, num_blocks)
            if blocks is not None:
                batch.grow(entry, blocks, allocation.num_tokens - num_before)
                return True
        return False
