"""A batch that the shards keep between calls, as the router sees it."""

from __future__ import annotations

from collections.abc import Iterable

from router.scheduling.entry import Entry
from router.shards.interface import CachedBatch


class RunningBatch:
    """Who is in the batch, and what is known of it on the shards.

    `entries` holds the requests that the router still wants, in batch order; a stock shard keeps others until they are
    filtered away. `size` and `max_tokens` are the shard's figures of its last answer.
    """

    __slots__ = (
        "_last_step",
        "batch_id",
        "dirty",
        "ended",
        "entries",
        "max_tokens",
        "num_decodes",
        "num_steps",
        "num_unanswered",
        "size",
    )

    def __init__(self, batch_id: int, entries: Iterable[Entry]) -> None:
        self.batch_id = batch_id
        self.entries: dict[int, Entry] = {}
        for entry in entries:
            entry.batch = self
            self.entries[entry.request_id] = entry
        self.size = len(self.entries)
        self.max_tokens = 0
        self.num_decodes = 0  # sent, not answered
        self.num_steps = 0  # Decodes sent in all
        # The Decode at which the longest request must end; the Prefill has given the first token.
        self._last_step = max((e.request.stopping.max_new_tokens - 1 for e in self.entries.values()), default=0)
        self.num_unanswered = 0  # Prefill or FilterBatch sent, not answered
        self.dirty = False  # the shards hold rows that nobody wants
        self.ended = False  # nothing more is sent for it, nothing more is expected of it

    def absorb(self, other: RunningBatch) -> None:
        """`other` is merged behind this batch; its own record is void from now on."""
        for entry in other.entries.values():
            entry.batch = self
        self.entries.update(other.entries)
        self._last_step = max(self._last_step, self.num_steps + other._last_step)
        self.size += other.size
        self.max_tokens += other.max_tokens
        other.entries = {}
        other.ended = True

    @property
    def is_exhausted(self) -> bool:
        """Whether the Decodes sent so far bring every request to its largest number of tokens."""
        return self.num_steps >= self._last_step

    def remove(self, entry: Entry) -> None:
        """The router no longer wants this request."""
        self.entries.pop(entry.request_id, None)
        entry.batch = None

    def update(self, cached: CachedBatch) -> list[Entry]:
        """Take over what the shards say they keep. Returns the entries that they ought to keep and do not."""
        self.size = cached.size
        self.max_tokens = cached.max_tokens
        if cached.size == len(self.entries):
            return []
        kept = set(cached.request_ids)
        return [entry for request_id, entry in self.entries.items() if request_id not in kept]
