"""The queue: strictly first come, first served, and which of its heads fit into the next Prefill.

Plain synchronous code, used by the scheduler's task only. Mirrors TGI's backends/v3/src/queue.rs, but frees without
side effects when an entry is put back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from router.scheduling.blocks import BlockAllocator
from router.scheduling.budget import round_up
from router.scheduling.entry import Entry

# Entries whose caller has left are skipped when they reach the front. Behind a head that waits for blocks they could
# pile up, so the queue is swept when they are many.
_SWEEP_AT = 64


@dataclass(frozen=True, slots=True)
class NextBatch:
    """What the queue gives out: entries with `started_at` and (paged) `allocation` set, in queue order."""

    batch_id: int
    entries: list[Entry]
    max_tokens: int
    max_blocks: int


@dataclass(slots=True)
class _Scan:
    """Running sums of one scan of the queue."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    max_input_length: int = 0
    max_blocks: int = 0


class RequestQueue:
    """Waiting entries and the rules by which they are taken.

    `allocator` is None in padded mode, where budgets are arithmetic; in paged mode the allocator alone limits.
    `on_dropped` is called for every entry that is forgotten because its caller has left.
    """

    def __init__(
        self,
        *,
        block_size: int,
        speculate: int = 0,
        allocator: BlockAllocator | None,
        on_dropped: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self._entries: deque[Entry] = deque()
        self._next_request_id = 0
        self._next_batch_id = 0
        self._block_size = max(block_size, 1)
        self._speculate = speculate
        self._allocator = allocator
        self._on_dropped = on_dropped
        self._num_left = 0

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, entry: Entry) -> None:
        entry.request_id = self._next_request_id
        self._next_request_id += 1
        self._entries.append(entry)

    def caller_left(self) -> None:
        """One of the waiting entries was closed."""
        self._num_left += 1
        if self._num_left >= _SWEEP_AT and 2 * self._num_left >= len(self._entries):
            kept = deque(e for e in self._entries if not e.closed)
            for entry in self._entries:
                if entry.closed:
                    self._drop(entry)
            self._entries = kept
            self._num_left = 0

    def drain(self) -> list[Entry]:
        """Take everything out; for when the server gives up."""
        entries = list(self._entries)
        self._entries.clear()
        self._num_left = 0
        return entries

    def can_ever_fit(self, input_length: int, max_new_tokens: int, prefill_budget: int, token_budget: int) -> bool:
        """Whether such a request would be taken if nothing else were there."""
        if input_length > round_up(prefill_budget, self._block_size):
            return False
        if self._allocator is None:
            return input_length + max_new_tokens + self._speculate <= token_budget
        blocks = -(-self._num_positions(input_length, max_new_tokens) // self._block_size)
        return blocks <= self._allocator.num_usable

    def next_batch(
        self, min_size: int | None, max_size: int | None, prefill_budget: int, token_budget: int
    ) -> NextBatch | None:
        """The longest run of heads that fits, or None.

        None also when fewer than `min_size` fit; all are put back in their old order then. The first entry that does
        not fit ends the scan: nobody overtakes. The prefill budget is rounded up to whole blocks.
        """
        if prefill_budget <= 0 or token_budget <= 0 or max_size == 0 or not self._entries:
            return None
        if min_size is not None and len(self._entries) < min_size:
            return None
        picked, scan = self._pick(max_size, round_up(prefill_budget, self._block_size), token_budget)
        if min_size is not None and len(picked) < min_size:
            for entry in reversed(picked):
                self._put_back(entry)
            return None
        if not picked:
            return None
        now = time.monotonic()
        for entry in picked:
            entry.started_at = now
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        return NextBatch(batch_id, picked, scan.prefill_tokens + scan.decode_tokens, scan.max_blocks)

    def _pick(self, max_size: int | None, prefill_budget: int, token_budget: int) -> tuple[list[Entry], _Scan]:
        picked: list[Entry] = []
        scan = _Scan()
        while self._entries:
            entry = self._entries.popleft()
            if entry.closed:
                self._num_left = max(self._num_left - 1, 0)
                self._drop(entry)
                continue
            if self._allocator is None:
                fits = self._fits_padded(entry, len(picked), scan, prefill_budget, token_budget)
            else:
                fits = self._fits_paged(entry, self._allocator, scan, prefill_budget)
            if not fits:
                self._put_back(entry)
                break
            picked.append(entry)
            if len(picked) == max_size:
                break
        return picked, scan

    def _fits_padded(self, entry: Entry, num_picked: int, scan: _Scan, prefill_budget: int, token_budget: int) -> bool:
        # Every row is padded to the longest prompt. A rejected entry stays in the sums, as in TGI; shards ignore them.
        scan.max_input_length = max(scan.max_input_length, entry.request.input_length)
        scan.prefill_tokens = (num_picked + 1) * scan.max_input_length
        scan.decode_tokens += entry.request.stopping.max_new_tokens
        total = scan.prefill_tokens + scan.decode_tokens + self._speculate
        return scan.prefill_tokens <= prefill_budget and total <= token_budget

    def _fits_paged(self, entry: Entry, allocator: BlockAllocator, scan: _Scan, prefill_budget: int) -> bool:
        request = entry.request
        # Prompt logprobs need the whole prompt to be run, so such a prompt is not looked up among shared ones.
        prompt_ids = None if request.decoder_input_details else request.input_ids
        num_positions = self._num_positions(request.input_length, request.stopping.max_new_tokens)
        allocation = allocator.allocate(num_positions, prompt_ids)
        if allocation is None:
            return False
        entry.allocation = allocation
        scan.max_blocks = max(scan.max_blocks, len(allocation.blocks))
        # At least one token must be computed to get logits.
        allocation.prefix_length = min(allocation.prefix_length, request.input_length - 1)
        prefill_tokens = scan.prefill_tokens + request.input_length - allocation.prefix_length
        if prefill_tokens > prefill_budget:
            return False
        scan.prefill_tokens = prefill_tokens
        return True

    def _num_positions(self, input_length: int, max_new_tokens: int) -> int:
        return input_length + max_new_tokens + self._speculate - 1  # the last token is never written

    def _drop(self, entry: Entry) -> None:
        entry.done = True
        self._on_dropped(entry)

    def _put_back(self, entry: Entry) -> None:
        if entry.allocation is not None and self._allocator is not None:
            self._allocator.free(entry.allocation, 0)  # nothing has been written
            entry.allocation = None
        self._entries.appendleft(entry)
