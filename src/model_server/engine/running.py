"""A batch on the shard, what its steps keep between two calls, and a step that is on the device."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from model_server.batch.batch import Batch
from model_server.batch.decode_state import DecodeState
from model_server.batch.newest import NewestTokens
from model_server.batch.results import Generation
from model_server.batch.sequence import Sequence
from model_server.sampling.sampler import Sampled


@dataclass(slots=True)
class StepTimes:
    """When the parts of a step were reached on the host, by `time.perf_counter_ns`; 0: not reached.

    called: the call reached the device thread. began: its batch was put together. laid_out: its inputs were. enqueued:
    its forward was. sampled: its sampling was, too. concat_ns: how long merging batches took. idle_ns: how long the
    batch waited, with nothing of it on the device, before the step began.
    """

    called: int = field(default_factory=time.perf_counter_ns)
    began: int = 0
    laid_out: int = 0
    enqueued: int = 0
    sampled: int = 0
    concat_ns: int | None = None
    idle_ns: int = 0

    def phases(self, waited_from: int, on_host: int, done: int) -> tuple[int, ...]:
        """Durations in the order of `wire.step_phases.PHASES`; empty for a step that sampled nothing.

        waited_from, on_host, done: when waiting for the device began, when its tokens were on the host, and their text.
        """
        if not self.sampled:
            return ()
        return (
            self.idle_ns, self.laid_out - self.began, self.enqueued - self.laid_out, self.sampled - self.enqueued,
            on_host - waited_from, done - on_host,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class SubmittedStep:
    """A step on the device. `rows`: the sequences that get tokens in it, in the order of `sampled`; `refused`: answers
    for requests that took no part in it; `joined_since`: requests that came into its batch after it was submitted."""

    times: StepTimes
    rows: list[Sequence] = field(default_factory=list)
    sampled: Sampled | None = None
    refused: list[Generation] = field(default_factory=list)
    joined_since: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Running:
    """A batch and the state of its steps, which the engine and its `Stepper` write.

    decode: the tensors of its steps. newest: the tokens sampled last, on the device. in_flight: the newest step
    that sampled something and is not collected. lost_at: when the step began whose failure ended the batch.
    """

    batch: Batch
    decode: DecodeState
    newest: NewestTokens | None = None
    in_flight: SubmittedStep | None = None
    lost_at: int | None = None

    @property
    def repeats_rows(self) -> bool:
        """The next decode step may have the rows of the last one: all have tokens left and slots for them."""
        return self.batch.is_uniform and self.decode.repeats(self.batch.sequences)

    @property
    def needs_last_step(self) -> bool:
        """No step of the batch can be submitted before the one before it has been collected: what it computes follows
        from tokens that the host must have seen."""
        if self.batch.has_several or any(s.row.grammar is not None for s in self.batch.sequences):
            return True
        step = self.in_flight
        return step is not None and step.sampled is not None and step.sampled.several

    def filter(self, request_ids: Iterable[int], *, strict: bool) -> None:
        """As `Batch.filter`, and forget the state of those that left."""
        if self.batch.filter(request_ids, strict):
            self._forget_others()

    def drop_finished(self, *, keep_visible: bool) -> None:
        """As `Batch.drop_finished`, and forget the state of those that ended."""
        if self.batch.drop_finished(keep_visible):
            self._forget_others()

    def _forget_others(self) -> None:
        self.decode.release(self.batch.sequences)
        if self.in_flight is None:
            self.newest = None  # the host has seen all of it
