"""The queue, first come first served, as TGI's (backends/v3/src/queue.rs), within each priority and API key; only waits
for adapter slots are passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from router.request import ValidRequest
from router.scheduling.cache.blocks import BlockAllocator
from router.scheduling.cache.keys import ContentRange
from router.scheduling.entry import Entry
from router.scheduling.queue.adapter_slots import AdapterSlots, Verdict
from router.scheduling.queue.budget import Budget, round_up
from router.scheduling.queue.fair import FairLine, KeyWork
from wire.decoder_blocks import positions_between
from wire.images.borders import chunk_end, encoder_end

# Entries whose caller has disconnected are skipped when they reach the front. While the head waits for blocks they
# could pile up, so the queue is swept when they are many.
_SWEEP_AT = 64

# What a request that can grow reserves for its answer at first; TGI's slice. Far more tokens than steps are in flight:
# those behind the step that brings the first token need no more blocks.
RESERVED_NEW_TOKENS = 1024
# After this many preemptions a request gets all it can ever need before it runs again.
_MAX_PREEMPTIONS = 3
# Entries without a slot that are passed in one look at the queue.
_MOST_PASSED = 1024


@dataclass(frozen=True, slots=True)
class NextBatch:
    """Entries with `started_at` and `allocation`, in order; only the last may have a `chunk_len`."""

    batch_id: int
    entries: list[Entry]


@dataclass(slots=True)
class _Scan:
    """A scan's findings."""

    picked: list[Entry] = field(default_factory=list)
    # Waiting for a slot, with how many were picked before.
    passed: list[tuple[int, Entry]] = field(default_factory=list)
    prefill_tokens: int = 0
    image_rows: int = 0  # that shards may have to encode
    has_blocks: bool = True  # for the entry that was looked at last
    is_full: bool = False


class RequestQueue:
    """Waiting entries, and the rules of taking them."""

    def __init__(
        self,
        *,
        block_size: int,
        allocator: BlockAllocator,
        chunking: bool = False,
        can_grow: bool = False,
        may_share: Callable[[ValidRequest], bool] = lambda request: False,
        adapters: AdapterSlots | None = None,
        image_reserve: int = 0,
        decoder_prefix: int = 0,
        on_dropped: Callable[[Entry], None] = lambda entry: None,
        key_work: KeyWork | None = None,
    ) -> None:
        self._entries = FairLine(key_work)
        self._next_request_id = 0
        self._next_batch_id = 0
        self._block_size = max(block_size, 1)
        self._allocator = allocator
        # The last prompt may be split.
        self._chunking = chunking
        # Running requests get blocks later.
        self._can_grow = can_grow
        # Whose tokens are shared.
        self._may_share = may_share
        self._adapters = adapters
        # Positions per image beside its tokens.
        self._image_reserve = image_reserve
        # Of a decoder with blocks of its own: the encoder computes prompts whole.
        self._decoder_prefix = decoder_prefix
        self._on_dropped = on_dropped
        self._num_left = 0
        # The entry that got no blocks, and the allocator's version and the spare blocks at that time: it is not tried
        # again at every step, since looking up a long prompt takes milliseconds.
        self._blocked: tuple[Entry, int, int] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def sizes(self) -> Mapping[str, int]:
        """Count the requests of each API key that has any."""
        return self._entries.sizes()

    def holds_tokens(self, count: int) -> bool:
        """Whether `count` prompt tokens wait, without those for slots."""
        for entry in self._joinable():
            count -= entry.num_tokens
            if count <= 0:
                return True
        return False

    def waits_since_before(self, moment: float) -> bool:
        """Whether the first unrun one was queued before `moment`."""
        new = (entry.queued_at for entry in self._joinable() if entry.started_at is None)
        return next(new, moment) < moment

    def start(self, running: Iterable[Entry], num_steps: int) -> None:
        if self._adapters is not None:
            self._adapters.start(running, num_steps)

    def append(self, entry: Entry) -> None:
        entry.queued(self._next_request_id)
        self._next_request_id += 1
        self._entries.append(entry)

    def put_first(self, entry: Entry) -> None:
        """Put back first, with id and age."""
        self._entries.appendleft(entry)
        self._num_left += entry.closed

    def caller_left(self) -> None:
        """One of the waiting entries was closed."""
        self._num_left += 1
        if self._num_left >= _SWEEP_AT and 2 * self._num_left >= len(self._entries):
            for entry in self._entries:
                if entry.closed:
                    self._drop(entry)
            self._entries.replace([entry for entry in self._entries if not entry.closed])
            self._num_left = 0

    def drain(self) -> list[Entry]:
        """Take everything out."""
        entries = list(self._entries)
        self._entries.replace(())
        self._num_left = 0
        return entries

    def most_new_tokens(self, input_length: int, prefill_budget: int, *, num_images: int = 0) -> int:
        """Return an empty server's most tokens; below 0: none."""
        if not self._chunking and input_length > round_up(prefill_budget, self._block_size):
            return -1
        num_positions = self._allocator.num_usable * self._block_size
        num_positions -= positions_between(input_length, self._decoder_prefix, self._block_size)
        return num_positions - self._num_positions(input_length, 0, num_images)

    def next_batch(self, budget: Budget, spare_blocks: int = 0) -> NextBatch | None:
        """Return the longest run of heads within the budget, if `min_size` fit.

        None overtakes, except slots' waiters. Prompts are rounded up to blocks; `spare_blocks` stay free.
        """
        if budget.prefill_tokens <= 0 or budget.max_size == 0 or not self._entries:
            return None
        min_size = budget.min_size
        if min_size is not None and len(self._entries) < min_size:
            return None
        self._entries.charge_generated()
        if self._blocked is not None and self._is_blocked(self._entries.first, spare_blocks):
            return None
        scan = self._pick(budget, spare_blocks)
        picked = scan.picked
        if min_size is not None and len(picked) < min_size:
            self._put_all_back(scan)
            return None
        for _, entry in reversed(scan.passed):
            self._entries.appendleft(entry)
        if not picked:
            return None
        now = time.monotonic()
        for entry in picked:
            entry.started(now)
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        return NextBatch(batch_id, picked)

    def _joinable(self) -> Iterator[Entry]:
        entries = (entry for entry in self._entries if not entry.closed)
        return entries if self._adapters is None else self._adapters.joinable(entries, _MOST_PASSED)

    def _is_blocked(self, entry: Entry, spare_blocks: int) -> bool:
        """Whether it would find as few blocks again."""
        if self._blocked is None:
            return False
        blocked, version, spare = self._blocked
        same = blocked is entry and not entry.closed and version == self._allocator.version
        return same and spare_blocks >= spare

    def _pick(self, budget: Budget, spare_blocks: int) -> _Scan:
        prefill_budget = round_up(budget.prefill_tokens, self._block_size)
        scan = _Scan()
        picked = scan.picked
        while self._entries and len(scan.passed) < _MOST_PASSED:
            entry = self._entries.popleft()
            if entry.closed:
                self._num_left = max(self._num_left - 1, 0)
                self._drop(entry)
                continue
            verdict = Verdict.JOINS if self._adapters is None else self._adapters.verdict(entry)
            if verdict is Verdict.WAITS:
                scan.passed.append((len(picked), entry))
                continue
            if verdict is Verdict.BLOCKS or self._is_blocked(entry, spare_blocks):
                self._entries.appendleft(entry)
                break
            if not self._fits(entry, scan, budget, prefill_budget, spare_blocks):
                self._put_back(entry)
                if not scan.has_blocks:
                    self._blocked = (entry, self._allocator.version, spare_blocks)
                break
            picked.append(entry)
            if entry.request.key:
                self._entries.charge(entry)
            if scan.is_full or len(picked) == budget.max_size:
                break
        return scan

    def _fits(self, entry: Entry, scan: _Scan, budget: Budget, prefill_budget: int, spare_blocks: int) -> bool:
        allocator = self._allocator
        token_ids = entry.token_ids if self._may_share(entry.request) else None
        request = entry.request
        content = content_of(request)
        allocation = allocator.allocate(
            self._num_reserved(entry),
            token_ids,
            request.cache_namespace,
            content,
            num_prompt=request.input_length,
            answer_start=request.answer_start,
        )
        scan.has_blocks = False
        if allocation is None:
            return False
        entry.admit(allocation)
        if allocator.num_free < spare_blocks:
            return False
        scan.has_blocks = True
        # At least one token must be computed to get logits.
        allocation.prefix_length = min(allocation.prefix_length, entry.num_tokens - 1)
        to_compute = entry.num_tokens - allocation.prefix_length
        left = prefill_budget - scan.prefill_tokens
        if not self._chunking and to_compute > left:
            return False
        chunk_len, rows = to_compute, 0
        if self._chunking:
            if left <= 0:
                return False
            if not self._decoder_prefix:
                chunk_len, rows = _first_chunk(entry, allocation.prefix_length, min(to_compute, left), scan, budget)
            # What is computed whole may exceed its step as the first.
            if scan.picked and (chunk_len > left or (rows and _exceeds(scan.image_rows + rows, budget))):
                return False
        scan.image_rows += rows
        if chunk_len == to_compute:
            scan.prefill_tokens += to_compute
            scan.is_full = to_compute > left
        else:
            entry.admit(allocation, chunk_len=chunk_len)
            scan.is_full = True
        return True

    def _num_reserved(self, entry: Entry) -> int:
        """Return its first positions: all, or whole blocks for less."""
        num_images = len(entry.request.images)
        needed = self._num_positions(entry.num_tokens, entry.num_remaining, num_images)
        if not self._can_grow or entry.num_preemptions >= _MAX_PREEMPTIONS:
            return needed
        first = self._num_positions(entry.num_tokens, min(entry.num_remaining, RESERVED_NEW_TOKENS), num_images)
        return min(round_up(first, self._block_size), needed)

    def _num_positions(self, input_length: int, max_new_tokens: int, num_images: int) -> int:
        # The last token is never written.
        return input_length + max_new_tokens - 1 + num_images * self._image_reserve

    def _drop(self, entry: Entry) -> None:
        entry.drop()
        if entry.dropped_as is not None:
            self._on_dropped(entry)

    def _put_all_back(self, scan: _Scan) -> None:
        """In their old order."""
        left = len(scan.picked)
        for num_before, entry in [*reversed(scan.passed), (0, None)]:
            for picked in reversed(scan.picked[num_before:left]):
                self._put_back(picked)
            left = num_before
            if entry is not None:
                self._entries.appendleft(entry)

    def _put_back(self, entry: Entry) -> None:
        if entry.allocation is not None:
            self._allocator.free(entry.allocation)  # nothing has been written
            entry.release()
        self._entries.appendleft(entry)


def _first_chunk(entry: Entry, prefix_length: int, most: int, scan: _Scan, budget: Budget) -> tuple[int, int]:
    """Return the first chunk's tokens, and image rows to encode."""
    images = entry.request.images
    if not images:
        return most, 0
    whole = [(one.place.start, one.place.stop) for one in images if one.is_indivisible]
    end = chunk_end(prefix_length, prefix_length + most, whole)
    rows = [(one.place.start, one.place.stop, one.image.num_embeds) for one in images]
    left = sum(count for _, _, count in rows) if budget.image_rows is None else budget.image_rows - scan.image_rows
    takes_any = budget.takes_any_image and not scan.picked
    end, taken = encoder_end(prefix_length, end, rows, left, takes_any=takes_any)
    return end - prefix_length, taken


def _exceeds(image_rows: int, budget: Budget) -> bool:
    return budget.image_rows is not None and image_rows > budget.image_rows


def content_of(request: ValidRequest) -> list[ContentRange]:
    """Return what stands for a prompt's images in the prefix cache."""
    return [ContentRange(p.start, p.stop, p.key) for p in (image.place for image in request.images)]
