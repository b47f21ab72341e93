"""Batches between two calls, by id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from model_server.batch.sequence import Sequence
from model_server.engine.calls import StepCall
from model_server.engine.steps.running import Running
from model_server.errors import BatchGoneError

# Ids of failed batches that are remembered; the router clears each one soon after the failure.
REMEMBERED_FAILURES = 1024


class BatchStore:
    """Batches by id, and the ids that were lost to an error."""

    def __init__(self) -> None:
        self._batches: dict[int, Running] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._batches)

    def put(self, running: Running) -> None:
        self._gone.pop(running.batch.id, None)
        self._batches[running.batch.id] = running

    def find(self, batch_id: int) -> Running | None:
        """Return a batch, or None if it ended.

        Raises:
            BatchGoneError: It was lost to an error.
        """
        if batch_id in self._gone:
            raise BatchGoneError(batch_id)
        return self._batches.get(batch_id)

    def remove(self, running: Running) -> None:
        """Remove an ended or merged batch, whose id may belong to later requests already."""
        if self._batches.get(running.batch.id) is running:
            del self._batches[running.batch.id]

    def forget_ended(self, call: StepCall) -> None:
        """Forget batches whose end the router knew at the call."""
        for running in [one for one in self._batches.values() if one.has_ended(call)]:
            self.remove(running)

    def sequences(self, call: StepCall) -> Iterator[Sequence]:
        """Yield sequences with further steps: the same on every rank."""
        for running in self._batches.values():
            for sequence in running.batch.sequences:
                if sequence.ended_in is None or not call.follows_answer_of(sequence.ended_in):
                    yield sequence

    def lose(self, batch_id: int) -> None:
        """The batch failed."""
        self._batches.pop(batch_id, None)
        self._gone[batch_id] = None
        while len(self._gone) > REMEMBERED_FAILURES:
            self._gone.popitem(last=False)

    def clear(self, batch_id: int | None) -> None:
        """Forget one batch and its failure, or all."""
        if batch_id is None:
            self._batches.clear()
            self._gone.clear()
        else:
            self._batches.pop(batch_id, None)
            self._gone.pop(batch_id, None)
