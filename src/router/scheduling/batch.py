"""A batch on the shards, as the router sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.scheduling.entry import Entry
from router.shards.interface import BlockGrowth, CachedBatch


class ChunkPlan:
    """How far prompts are after sent steps, and the next step's part of each.

    Known without answers: the router sets each step's prompt tokens, and shards give them to the oldest first.
    """

    __slots__ = ("_prompts",)

    def __init__(self) -> None:
        self._prompts: list[tuple[Entry, int, int]] = []  # with the tokens left, and how many of them come next

    def __bool__(self) -> bool:
        """Whether the next step computes prompts."""
        return bool(self._prompts)

    @property
    def is_cut(self) -> bool:
        """Whether a prompt uses up the next step's tokens."""
        return any(chunk < left for _, left, chunk in self._prompts)

    def remove(self, entry: Entry) -> None:
        """Drop a request's prompt."""
        if self._prompts:
            self._prompts = [prompt for prompt in self._prompts if prompt[0] is not entry]

    def step_sent(self, chunk_tokens: int, newcomers: Iterable[Entry]) -> list[Entry]:
        """Note a step with `newcomers`' first chunks, and the next one's `chunk_tokens`; return who gets a
        first token.
        """
        first = [(entry, entry.num_to_compute, entry.chunk_len or entry.num_to_compute) for entry in newcomers]
        sent = self._prompts + first
        self._prompts = []
        through = []
        for entry, left, chunk in sent:
            if left <= chunk:
                through.append(entry)
                continue
            next_chunk = max(min(left - chunk, chunk_tokens), 1)  # one of each at least
            chunk_tokens -= next_chunk
            self._prompts.append((entry, left - chunk, next_chunk))
        return through


class RunningBatch:
    """Who is in the batch, and its state on the shards; written by its methods only."""

    __slots__ = (
        "_current_tokens",
        "_draft_tokens",
        "_ends_at",
        "_full_at",
        "_leaving",
        "_plan",
        "batch_id",
        "dirty",
        "ended",
        "entries",
        "failed",
        "growing",
        "into",
        "max_tokens",
        "new_blocks",
        "num_decodes",
        "num_steps",
        "num_unanswered",
        "prefilling",
        "size",
    )

    def __init__(
        self, batch_id: int, entries: Iterable[Entry], into: RunningBatch | None = None, *, draft_tokens: int = 0
    ) -> None:
        """Start a batch.

        Args:
            into: The running batch that it joins.
            draft_tokens: A step's most tokens beyond one.
        """
        self.batch_id = batch_id
        self.into = into
        self._draft_tokens = draft_tokens
        # Still wanted, in order of admission.
        self.entries = {entry.request_id: entry for entry in entries}
        self.prefilling = dict(self.entries)  # those that have not got a token here yet
        self.growing: dict[int, Entry] = {}  # those with a first token that hold fewer blocks than they can need
        self._full_at: dict[int, int] = {}  # for each of them the step that needs more blocks than it has
        self.new_blocks: list[BlockGrowth] = []  # blocks got for them, to be sent with the next step
        # The shards' last figures, as `max_tokens`.
        self.size = len(self.entries)
        self.max_tokens = 0
        self._current_tokens = 0  # the shards' figure of their last answer: what the step after it computes
        self.num_decodes = 0  # sent, not answered
        self.num_steps = 0  # sent: Prefills and Decodes
        self._plan = ChunkPlan()
        self._ends_at: dict[int, int] = {}  # the step by which each request ends whose first token is on its way
        self.num_unanswered = 0  # Prefill or FilterBatch sent, not answered
        self.dirty = False  # the shards hold rows that are no longer wanted
        self._leaving: list[Entry] = []  # whose rows the shards have until a FilterBatch is sent
        self.ended = False  # nothing more is sent for it, nothing more is expected of it
        self.failed = False  # it ended by an error

    @property
    def on_shards(self) -> list[Entry]:
        """Return rows the shards have at the next call, also unwanted ones before a FilterBatch."""
        return [*self.entries.values(), *self._leaving]

    @property
    def computes_prompts(self) -> bool:
        return bool(self._plan)

    @property
    def is_cut(self) -> bool:
        """Whether a prompt uses up the next step, so none can join."""
        return self._plan.is_cut

    @property
    def next_tokens(self) -> tuple[int, int]:
        """Return the next step's prompt tokens, and all; others join a step in flight only without prompts."""
        if self.num_decodes:
            return 0, len(self.entries)
        num_prefilling = len(self.prefilling)
        prompts = max(self._current_tokens - (self.size - num_prefilling), 0) if num_prefilling else 0
        return prompts, self._current_tokens

    @property
    def is_exhausted(self) -> bool:
        """Whether sent steps bring all to their most tokens."""
        return not self._plan and all(at <= self.num_steps for at in self._ends_at.values())

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may be sent before answers, when none could join a prompt's last tokens."""
        return not self._plan or self._plan.is_cut

    # Calls.

    def call_sent(self, *, is_decode: bool) -> None:
        """Note a call in flight."""
        if is_decode:
            self.num_decodes += 1
        else:
            self.num_unanswered += 1

    def call_answered(self, *, is_decode: bool) -> None:
        if is_decode:
            self.num_decodes -= 1
        else:
            self.num_unanswered -= 1

    def step_sent(self, chunk_tokens: int | None, newcomers: Iterable[Entry] = ()) -> None:
        """Note a step, and its growth.

        Args:
            chunk_tokens: Of the next step's prompts; None: none.
            newcomers: Whose prompts begin.
        """
        self.num_steps += 1
        self.new_blocks = []
        for entry in self._plan.step_sent(chunk_tokens or 0, newcomers):
            self._ends_at[entry.request_id] = self.num_steps + entry.num_remaining - 1

    def filter_sent(self) -> None:
        self.dirty = False
        self._leaving.clear()

    # Members.

    def joined(self) -> RunningBatch | None:
        """Note an answered Prefill; return the running batch joined, if any."""
        running = self.into
        if running is not None:
            self.into, self.batch_id = None, running.batch_id
        return running

    def absorb(self, other: RunningBatch) -> None:
        """Merge `other` behind this batch's requests."""
        self.entries.update(other.entries)
        self.prefilling.update(other.prefilling)
        self.growing.update(other.growing)
        self._full_at |= {one: at - other.num_steps + self.num_steps for one, at in other._full_at.items()}
        self._ends_at |= {one: at - other.num_steps + self.num_steps for one, at in other._ends_at.items()}
        self.size += other.size
        self.max_tokens += other.max_tokens
        self.dirty |= other.dirty
        self._leaving += other._leaving
        other.end()

    def first_token(self, entry: Entry, at_step: int) -> None:
        """Note a first token at that step (`num_steps`)."""
        entry.first_token()
        del self.prefilling[entry.request_id]
        if entry.allocation is not None and entry.allocation.num_tokens < entry.most_positions:
            self.growing[entry.request_id] = entry
            # Each step from now on writes one position; that of the first token is not written yet.
            num_free = entry.allocation.num_tokens - (entry.num_tokens - 1)
            self._full_at[entry.request_id] = at_step + num_free

    @property
    def full(self) -> list[Entry]:
        """Return who needs blocks for the next step."""
        return [self.growing[one] for one, at in self._full_at.items() if at <= self.num_steps]

    @property
    def short(self) -> list[Entry]:
        """Return who may need blocks if all steps bring their most."""
        most = self._draft_tokens * (self.num_decodes + 1)
        return [self.growing[one] for one, at in self._full_at.items() if at - most <= self.num_steps]

    def got_several(self, entry: Entry, num_tokens: int) -> None:
        """Note several tokens, which bring needs and ends forward."""
        for at in (self._full_at, self._ends_at):
            if entry.request_id in at:
                at[entry.request_id] -= num_tokens - 1

    def grow(self, entry: Entry, blocks: Sequence[int], num_positions: int) -> None:
        assert entry.allocation is not None
        self.new_blocks.append(BlockGrowth(entry.request_id, blocks))
        self._full_at[entry.request_id] += num_positions
        if entry.allocation.num_tokens >= entry.most_positions:
            del self.growing[entry.request_id], self._full_at[entry.request_id]

    def remove(self, entry: Entry) -> None:
        """The request has ended on the shards."""
        for of_batch in (self.entries, self.prefilling, self.growing, self._full_at):
            of_batch.pop(entry.request_id, None)
        steps_of = self.into or self
        steps_of._plan.remove(entry)
        steps_of._ends_at.pop(entry.request_id, None)

    def discard(self, entry: Entry) -> None:
        """Drop a request; a FilterBatch must follow."""
        self.remove(entry)
        self.new_blocks = [one for one in self.new_blocks if one.request_id != entry.request_id]
        self._leaving.append(entry)
        self.mark_dirty()

    def mark_dirty(self) -> None:
        self.dirty = True

    def update(self, cached: CachedBatch) -> list[Entry]:
        """Take over the shards' account; return entries they lost."""
        self.size = len(cached.request_ids)
        self.max_tokens = cached.max_tokens
        self._current_tokens = cached.current_tokens
        if self.size == len(self.entries):
            return []
        kept = set(cached.request_ids)
        return [entry for request_id, entry in self.entries.items() if request_id not in kept]

    def compare_size(self) -> None:
        """Demand a FilterBatch if shards keep more."""
        self.dirty = self.size != len(self.entries)
        if not self.dirty:
            self._leaving.clear()

    def end(self, *, failed: bool = False) -> list[Entry]:
        """End the batch; return its requests."""
        entries = list(self.entries.values())
        self.ended = True
        self.failed = self.failed or failed
        self.entries = {}
        return entries
