"""A batch that the shards keep between calls, as the router sees it."""

from __future__ import annotations

from collections.abc import Iterable

from router.scheduling.entry import Entry
from router.shards.interface import CachedBatch, Growth


class RunningBatch:
    """Who is in the batch, and what is known of it on the shards.

    `entries` holds the requests that the router still wants, in batch order, which is the order of their admission; a
    stock shard keeps others until they are filtered away. `size`, `max_tokens` and `current_tokens` are the shard's
    figures of its last answer.
    """

    __slots__ = (
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
        self.entries: dict[int, Entry] = {}
        for entry in entries:
            entry.batch = self
            self.entries[entry.request_id] = entry
        self.prefilling = dict(self.entries)  # those that have not got a token here yet
        self.growing: dict[int, Entry] = {}  # those that hold fewer blocks than they can come to need
        self.growth: list[Growth] = []  # blocks got for them, to be told with the next step
        self.size = len(self.entries)
        self.max_tokens = 0
        self.current_tokens = 0
        self.num_decodes = 0  # sent, not answered
        self.num_steps = 0  # steps sent in which requests get their second or a later token
        self._last_step = 0  # the step at which the longest request that has its first token must end
        self.num_unanswered = 0  # Prefill or FilterBatch sent, not answered
        self.dirty = False  # the shards hold rows that nobody wants
        self.ended = False  # nothing more is sent for it, nothing more is expected of it
        self.failed = False  # it ended by an error

    def absorb(self, other: RunningBatch) -> None:
        """`other` is merged behind this batch; its own record is void from now on."""
        for entry in other.entries.values():
            entry.batch = self
        self.entries.update(other.entries)
        self.prefilling.update(other.prefilling)
        self.growing.update(other.growing)
        self._last_step = max(self._last_step, self.num_steps + other._last_step)
        self.size += other.size
        self.max_tokens += other.max_tokens
        self.dirty |= other.dirty
        other.entries = {}
        other.ended = True

    @property
    def prompt_tokens(self) -> int:
        """How much of `current_tokens` is prompts: all but a token of each other request."""
        return max(self.current_tokens - (self.size - len(self.prefilling)), 0) if self.prefilling else 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the steps sent so far bring every request to its largest number of tokens."""
        return not self.prefilling and self.num_steps >= self._last_step

    def prefilled(self, entry: Entry, num_to_come: int) -> None:
        """The request got its first token here, when no Decode was in flight; so many may follow."""
        del self.prefilling[entry.request_id]
        self._last_step = max(self._last_step, self.num_steps + num_to_come)

    def stepped(self) -> None:
        """A step of this batch is sent."""
        self.num_steps += 1
        for entry in self.growing.values():
            if entry.prefilled:
                entry.num_positions += 1
        self.growth = []

    def remove(self, entry: Entry) -> None:
        """The router no longer wants this request."""
        for of_batch in (self.entries, self.prefilling, self.growing):
            of_batch.pop(entry.request_id, None)
        entry.batch = None

    def update(self, cached: CachedBatch) -> list[Entry]:
        """Take over what the shards say they keep. Returns the entries that they ought to keep and do not."""
        self.size = cached.size
        self.max_tokens = cached.max_tokens
        self.current_tokens = cached.current_tokens
        if cached.size == len(self.entries):
            return []
        kept = set(cached.request_ids)
        return [entry for request_id, entry in self.entries.items() if request_id not in kept]
