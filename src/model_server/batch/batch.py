"""Ordered sequences that run together: filter and concatenate are list operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from model_server.batch.results import CachedBatch
from model_server.batch.sequence import Sequence
from wire.images.borders import chunk_end, encoder_end


class Batch:
    """Running sequences under one id.

    `is_prefilling`: some sequence's first tokens are not all in the cache or on their way.
    """

    def __init__(self, batch_id: int, sequences: list[Sequence]) -> None:
        self.id = batch_id
        self.sequences = sequences
        self.is_prefilling = any(s.is_prefilling for s in sequences)
        self._listed: list[int] | None = None  # ids that the router knows
        self._order = [s.id for s in sequences]

    @property
    def is_uniform(self) -> bool:
        """The next forward computes one token of each sequence, its newest."""
        return not self.is_prefilling

    @property
    def is_running(self) -> bool:
        """Some sequence has not ended."""
        return any(not s.finished for s in self.sequences)

    def plan_chunks(self, max_prefill_tokens: int, chunk_tokens: int | None = None) -> None:
        """Set how much of each unfinished prompt the forward after the one just submitted computes.

        One token is kept for each sequence but one, also for those whose end the router does not know yet; what is left
        of `max_prefill_tokens`, but not more than `chunk_tokens`, goes to the oldest first, so that none starves.
        Each advances by at least one token, and over an image whose tokens see each other both ways as a whole. A chunk
        ends before an image that would have to be encoded beyond `max_prefill_tokens` rows of the step's images, of
        which the first always is.
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
                if sequence.images is not None:
                    start = sequence.cache_length
                    end = chunk_end(start, start + sequence.input_length, sequence.images.whole)
                    takes_any = rows == max_prefill_tokens
                    end, taken = encoder_end(start, end, sequence.images.to_encode(), rows, takes_any=takes_any)
                    rows -= taken
                    sequence.input_length = end - start
                budget -= sequence.input_length

    def note_several(self, rows: list[Sequence], counts: list[int]) -> None:
        """A step of `rows` gave them this many tokens each."""
        for sequence, count in zip(rows, counts, strict=True):
            sequence.accept(count - 1)

    def note_ended(self, number: int) -> None:
        """The step of the call with this number is collected: what ended in it is listed no longer."""
        for sequence in self.sequences:
            if sequence.finished and sequence.ended_in is None:
                sequence.ended_in = number
                self._listed = None

    def drop(self, leaving: Callable[[Sequence], bool]) -> bool:
        """Leave out sequences; whether there were any."""
        kept = [s for s in self.sequences if not leaving(s)]
        return len(kept) < len(self.sequences) and self._keep(kept)

    def filter(self, request_ids: Iterable[int]) -> bool:
        """Keep the named requests, in the order of the batch; whether some sequences left.

        An id that is not in the batch is of a request that ended in the meantime.
        """
        wanted = set(request_ids)
        self._listed = None
        return self._keep([s for s in self.sequences if s.id in wanted])

    def join(self, other: Batch) -> None:
        """Append another batch's requests; this batch's id stays."""
        self.sequences = self.sequences + other.sequences
        self.is_prefilling = self.is_prefilling or other.is_prefilling
        self._order = self._order + other._order
        self._listed = None

    def without(self, request_ids: Set[int]) -> Batch:
        """This batch as it was before these requests joined."""
        if not request_ids:
            return self
        before = Batch(self.id, [s for s in self.sequences if s.id not in request_ids])
        before._order = self._order
        return before

    def describe(self, block_size: int) -> CachedBatch:
        """The batch as the router sees it: without those that have ended."""
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
