"""A batch on the shard between calls, and a call whose step is on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from model_server.batch.batch import Batch
from model_server.batch.decode_state import DecodeState
from model_server.batch.newest import NewestTokens
from model_server.batch.results import Generation, StepResult
from model_server.batch.sequence import Sequence
from model_server.engine.calls import StepCall
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.maker import BatchSteps, StepMaker
from model_server.engine.steps.step import Collected, Step


class Running:
    """A batch, and what its steps leave for the next one."""

    def __init__(self, batch: Batch, context: StepContext, maker: StepMaker | None = None) -> None:
        """Take a batch that has taken no step."""
        self.batch = batch
        self._context = context
        self._maker = maker
        # The tensors of its decode steps.
        self.decode: DecodeState = context.decode_state()
        # A feature's.
        self.own: BatchSteps | None = None if maker is None else maker.of_batch(context, self.decode)
        # Last sampled tokens, on the device.
        self.newest: NewestTokens | None = None
        # The next step follows from what the newest brings, seen or not.
        self.needs_last_step = False
        # When the failed step that ended the batch began.
        self.lost_at: int | None = None
        self._last: Step | None = None

    @property
    def in_flight(self) -> Step | None:
        """The newest step that sampled, if it is not collected."""
        return None if self._last is None or self._last.is_collected else self._last

    @property
    def rows(self) -> list[Sequence]:
        """The rows with tokens left."""
        # A row that ended unknown to the router takes part while it has slots: other ranks may not have collected the
        # step in which it ended.
        rows = self.batch.sequences
        if self.repeats_rows:
            return rows
        going = [s for s in rows if not s.is_exhausted and (s.has_slots or not s.finished)]
        return rows if len(going) == len(rows) else going  # the list itself: by that the state knows its rows

    @property
    def repeats_rows(self) -> bool:
        """Whether the next step may have the last one's rows, with tokens and slots left."""
        return self.batch.is_uniform and self.decode.repeats(self.batch.sequences)

    @property
    def has_run(self) -> bool:
        """A step was taken that only decodes."""
        return self.decode.has_run or (self.own is not None and self.own.has_run)

    def on_submitted(self, step: Step) -> None:
        """Keep what the next step continues."""
        if step.sampled is not None:
            self._last = step
            self.newest = NewestTokens(step.rows, step.sampled.ids)
            self.needs_last_step = step.decides_next

    def on_collected(self, step: Step) -> None:
        """Let go of a step's tensors."""
        if self._last is step:
            self._last = None

    def note_other_step(self) -> None:
        """Note a step that neither `decode` nor `own` made."""
        self.decode.note_other_step()
        if self.own is not None:
            self.own.note_other_step()

    def join(self, other: Running) -> None:
        """Join a batch without uncollected steps."""
        if other.own is not None:
            other.own.note_other_step()  # what it knows of its rows goes to these
        self.batch.join(other.batch)

    def filter(self, request_ids: Iterable[int]) -> None:
        """Filter, and forget the state of rows that left."""
        if self.batch.filter(request_ids):
            self._forget_others()

    def drop(self, leaving: Callable[[Sequence], bool]) -> None:
        """Drop, and forget the state of rows that left."""
        if self.batch.drop(leaving):
            self._forget_others()

    def drop_finished(self) -> None:
        self.drop(lambda sequence: sequence.finished)

    def drop_tensors(self) -> None:
        """Free a lost batch's tensors, except the cache."""
        self.decode, self.newest, self._last = self._context.decode_state(), None, None
        self.own = None if self._maker is None else self._maker.of_batch(self._context, self.decode)

    def has_ended(self, call: StepCall) -> bool:
        """Whether all requests ended, as the router knew at the call."""
        return all(s.ended_in is not None and call.follows_answer_of(s.ended_in) for s in self.batch.sequences)

    def _forget_others(self) -> None:
        self.decode.release(self.batch.sequences)
        if self.own is not None:
            self.own.release(self.batch.sequences)
        if self.in_flight is None and not any(s.has_unseen for s in self.batch.sequences):
            self.newest = None


@dataclass(slots=True, eq=False, kw_only=True)
class SubmittedCall:
    """A call that is not collected."""

    running: Running
    # None: no row was left.
    step: Step | None
    times: StepTimes
    # Answers for requests that took no part.
    refused: list[Generation]
    # Of features, on what they did for it.
    reports: tuple[object, ...]
    # The call's, where the next step may come before this is collected.
    number: int | None
    # Requests that joined after it was submitted.
    joined_since: set[int] = field(default_factory=set)

    def is_over(self, *, follows_tokens: bool) -> bool:
        """Whether collecting would not wait, or no other step could be submitted before.

        Args:
            follows_tokens: The next step may depend on what this one brings.
        """
        sampled = None if self.step is None else self.step.sampled
        return sampled is None or (follows_tokens and self.running.needs_last_step) or sampled.is_over()

    def collect(self) -> Collected:
        """Wait for what the step brings."""
        if self.step is None:
            now = time.perf_counter_ns()
            return Collected([], (), now, now, now)
        return self.step.collect()

    def release(self) -> None:
        """Leave the collected step, and what ended in it."""
        if self.step is not None:
            self.running.on_collected(self.step)
        if self.number is not None:
            self.running.batch.note_ended(self.number)
        else:
            self.running.drop_finished()

    def result(self, found: Collected, block_size: int) -> StepResult:
        """Return the answer to the call."""
        times = self.times
        batch = self.running.batch.without(self.joined_since)  # the router's next answer tells it of the others
        done = time.perf_counter_ns()
        return StepResult(
            generations=self.refused + found.generations,
            batch=batch.describe(block_size) if batch.is_running else None,
            forward_ns=found.on_host - times.called,
            decode_ns=done - found.on_host,
            total_ns=done - times.called,
            concat_ns=times.concat_ns,
            phases_ns=times.phases(found.waited_from, found.on_host, found.done),
            reports=(*self.reports, *found.reports),
        )
