"""A batch that the shards keep between calls, as the router sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.scheduling.entry import Entry
from router.shards.interface import CachedBatch, Growth


class RunningBatch:
    """Who is in the batch, and what is known of it on the shards.

    `entries` holds the requests that the router still wants, in batch order, which is the order of their admission; an
    upstream TGI shard keeps others until they are filtered away. `size`, `max_tokens` and `current_tokens` are the
    shards' figures of their last answer. Its fields are written by its own methods only.
    """

    __slots__ = (
        "_full_at",
        "_last_step",
        "batch_id",
        "current_tokens",
        "dirty",
        "ended",
        "entries",
        "failed",
        "growing",
        "growth",
        "into",
        "max_tokens",
        "num_decodes",
        "num_steps",
        "num_unanswered",
        "prefilling",
        "size",
    )

    def __init__(self, batch_id: int, entries: Iterable[Entry], into: RunningBatch | None = None) -> None:
        """into: the running batch that these requests join by their Prefill."""
        self.batch_id = batch_id
        self.into = into
        self.entries = {entry.request_id: entry for entry in entries}
        self.prefilling = dict(self.entries)  # those that have not got a token here yet
        self.growing: dict[int, Entry] = {}  # those with a first token that hold fewer blocks than they can need
        self._full_at: dict[int, int] = {}  # for each of them the step that needs more blocks than it has
        self.growth: list[Growth] = []  # blocks got for them, to be sent with the next step
        self.size = len(self.entries)
        self.max_tokens = 0
        self.current_tokens = 0
        self.num_decodes = 0  # sent, not answered
        self.num_steps = 0  # steps sent in which requests get their second or a later token
        self._last_step = 0  # the step at which the longest request that has its first token must end
        self.num_unanswered = 0  # Prefill or FilterBatch sent, not answered
        self.dirty = False  # the shards hold rows that are no longer wanted
        self.ended = False  # nothing more is sent for it, nothing more is expected of it
        self.failed = False  # it ended by an error

    @property
    def prompt_tokens(self) -> int:
        """How much of `current_tokens` is prompts: all except a token of each other request."""
        return max(self.current_tokens - (self.size - len(self.prefilling)), 0) if self.prefilling else 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the steps sent so far bring every request to its largest number of tokens."""
        return not self.prefilling and self.num_steps >= self._last_step

    # Calls.

    def call_sent(self, *, is_decode: bool) -> None:
        """A call that runs or changes this batch is in flight."""
        if is_decode:
            self.num_decodes += 1
        else:
            self.num_unanswered += 1

    def call_answered(self, *, is_decode: bool) -> None:
        if is_decode:
            self.num_decodes -= 1
        else:
            self.num_unanswered -= 1

    def step_sent(self) -> None:
        """A step of this batch is sent, and with it what its requests grow by."""
        self.num_steps += 1
        self.growth = []

    def filter_sent(self) -> None:
        """A FilterBatch names the requests that are still wanted."""
        self.dirty = False

    # Members.

    def joined(self) -> RunningBatch | None:
        """The Prefill is answered by which these requests joined a running batch, whose id the shards keep, also when
        nothing else was left of it. Returns that batch; None if they did not join one."""
        running = self.into
        if running is not None:
            self.into, self.batch_id = None, running.batch_id
        return running

    def absorb(self, other: RunningBatch) -> None:
        """`other` is merged into this batch, after its own requests; the record of `other` is void from now on."""
        self.entries.update(other.entries)
        self.prefilling.update(other.prefilling)
        self.growing.update(other.growing)
        self._full_at |= {one: at - other.num_steps + self.num_steps for one, at in other._full_at.items()}
        self._last_step = max(self._last_step, self.num_steps + other._last_step)
        self.size += other.size
        self.max_tokens += other.max_tokens
        self.dirty |= other.dirty
        other.end()

    def first_token(self, entry: Entry, at_step: int) -> None:
        """The request got its first token in that step of the batch (see `num_steps`); later ones may be in flight."""
        entry.first_token()
        del self.prefilling[entry.request_id]
        still_to_come = entry.request.stopping.max_new_tokens - max(len(entry.generated_ids), 1)
        self._last_step = max(self._last_step, at_step + still_to_come)
        if entry.allocation is not None and entry.allocation.num_tokens < entry.most_positions:
            self.growing[entry.request_id] = entry
            # Each step from now on writes one position; that of the first token is not written yet.
            num_free = entry.allocation.num_tokens - (entry.num_tokens - 1)
            self._full_at[entry.request_id] = at_step + num_free

    @property
    def computes_whole_prompts(self) -> bool:
        """The Prefill of these requests brings each of them its first token."""
        return all(entry.chunk_len is None for entry in self.entries.values())

    @property
    def ends_with_its_prefill(self) -> bool:
        """No request may get a second token."""
        return all(entry.num_remaining <= 1 for entry in self.entries.values())

    @property
    def may_be_followed(self) -> bool:
        """Whether a step may be sent before the answer of the one in flight, which may bring first tokens: each of
        those requests can take another token without more blocks."""
        return not self.dirty and all(entry.has_next_position for entry in self.prefilling.values())

    @property
    def full(self) -> list[Entry]:
        """Those that need more blocks for the next step."""
        return [self.growing[one] for one, at in self._full_at.items() if at <= self.num_steps]

    def grow(self, entry: Entry, blocks: Sequence[int], num_positions: int) -> None:
        """`blocks` for `num_positions` more were appended to the request's table."""
        assert entry.allocation is not None
        self.growth.append(Growth(entry.request_id, blocks))
        self._full_at[entry.request_id] += num_positions
        if entry.allocation.num_tokens >= entry.most_positions:
            del self.growing[entry.request_id], self._full_at[entry.request_id]

    def emptied(self) -> None:
        """Every request has ended; others are about to join."""
        self._last_step = self.num_steps

    def remove(self, entry: Entry) -> None:
        """The request has ended on the shards."""
        for of_batch in (self.entries, self.prefilling, self.growing, self._full_at):
            of_batch.pop(entry.request_id, None)

    def discard(self, entry: Entry) -> None:
        """The router no longer wants this request, which the shards still have: a FilterBatch must follow."""
        self.remove(entry)
        self.growth = [g for g in self.growth if g.request_id != entry.request_id]
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """The shards hold a row that is no longer wanted."""
        self.dirty = True

    def update(self, cached: CachedBatch) -> list[Entry]:
        """Take over what the shards say they keep. Returns the entries that they ought to keep and do not."""
        self.size = cached.size
        self.max_tokens = cached.max_tokens
        self.current_tokens = cached.current_tokens
        if cached.size == len(self.entries):
            return []
        kept = set(cached.request_ids)
        return [entry for request_id, entry in self.entries.items() if request_id not in kept]

    def compare_size(self) -> None:
        """If the shards keep more rows than are wanted, a FilterBatch must follow."""
        self.dirty = self.size != len(self.entries)

    def end(self, *, failed: bool = False) -> list[Entry]:
        """Nothing more is sent for this batch. Returns the requests that were in it."""
        entries = list(self.entries.values())
        self.ended = True
        self.failed = self.failed or failed
        self.entries = {}
        return entries
