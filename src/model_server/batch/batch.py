"""Ordered sequences that run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from model_server.batch.results import CachedBatch
from model_server.batch.sequence import Sequence


class Batch:
    """Running sequences under one id."""

    def __init__(self, batch_id: int, sequences: list[Sequence]) -> None:
        self.id = batch_id
        self.sequences = sequences
        # Some first tokens are neither in the cache nor on their way.
        self.is_prefilling = any(s.is_prefilling for s in sequences)
        self._listed: list[int] | None = None  # ids that the router knows
        self._order = [s.id for s in sequences]

    @property
    def is_uniform(self) -> bool:
        """Whether the next forward computes one token of each sequence."""
        return not self.is_prefilling

    @property
    def is_running(self) -> bool:
        """Some sequence has not ended."""
        return any(not s.finished for s in self.sequences)

    def plan_chunks(self, max_prefill_tokens: int, chunk_tokens: int | None = None) -> None:
        """Set how much of each unfinished prompt the next forward computes.

        Each sequence advances by at least a token; what is left of `max_prefill_tokens`, up to `chunk_tokens` each,
        goes to the oldest first. What features know of a sequence may end its chunk elsewhere: they compute at most
        `max_prefill_tokens` rows before the forward.
        """
        self.is_prefilling = False
        budget = max_prefill_tokens - (len(self.sequences) - 1)
        if chunk_tokens is not None:
            budget = min(budget, chunk_tokens)
        rows = max_prefill_tokens
        for sequence in self.sequences:
            if sequence.is_prefilling:
                self.is_prefilling = True
                rest = sequence.prefill_length - sequence.cache_length
                sequence.input_length = max(min(rest, budget), 1)
                for attached in sequence.attachments:
                    start, takes_any = sequence.cache_length, rows == max_prefill_tokens
                    end, taken = attached.chunk_end(start, start + sequence.input_length, rows, takes_any=takes_any)
                    rows -= taken
                    sequence.input_length = end - start
                budget -= sequence.input_length

    def note_ended(self, number: int) -> None:
        """Drop what ended in the collected step of this number."""
        for sequence in self.sequences:
            if sequence.finished and sequence.ended_in is None:
                sequence.ended_in = number
                self._listed = None

    def drop(self, leaving: Callable[[Sequence], bool]) -> bool:
        """Leave out sequences; whether there were any."""
        kept = [s for s in self.sequences if not leaving(s)]
        return len(kept) < len(self.sequences) and self._keep(kept)

    def filter(self, request_ids: Iterable[int]) -> bool:
        """Keep the named requests in order, skip unknown ids, and return whether some left."""
        wanted = set(request_ids)
        self._listed = None
        return self._keep([s for s in self.sequences if s.id in wanted])

    def join(self, other: Batch) -> None:
        """Append another batch's requests."""
        self.sequences = self.sequences + other.sequences
        self.is_prefilling = self.is_prefilling or other.is_prefilling
        self._order = self._order + other._order
        self._listed = None

    def without(self, request_ids: Set[int]) -> Batch:
        """Return the batch before these requests joined."""
        if not request_ids:
            return self
        before = Batch(self.id, [s for s in self.sequences if s.id not in request_ids])
        before._order = self._order
        return before

    def describe(self, block_size: int) -> CachedBatch:
        """Describe the batch to the router, without ended requests."""
        running = [s for s in self.sequences if not s.finished]
        if self._listed is None:
            listed = {s.id for s in running}
            self._listed = [i for i in self._order if i in listed]
        return CachedBatch(
            id=self.id,
            request_ids=self._listed,
            max_tokens=block_size * sum([len(s.blocks) for s in running]),
            current_tokens=len(running) if self.is_uniform else sum(s.input_length for s in running),
        )

    def _keep(self, sequences: list[Sequence]) -> bool:
        if len(sequences) == len(self.sequences):
            return False
        self.sequences = sequences
        self.is_prefilling = self.is_prefilling and any(s.is_prefilling for s in sequences)
        self._listed = None
        listed = {s.id for s in sequences}
        self._order = [i for i in self._order if i in listed]
        return True
