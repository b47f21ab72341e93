"""A batch on the shard between calls, and a step on the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from model_server.batch.batch import Batch
from model_server.batch.decode_state import DecodeState
from model_server.batch.newest import NewestTokens
from model_server.batch.results import Drafted, Generation
from model_server.batch.sequence import Sequence
from model_server.distributed.stage_links import Passage
from model_server.engine.calls import StepCall
from model_server.memory.transfer import upload
from model_server.sampling.sampler import HostSampled
from model_server.speculation.device.speculator import BatchWindows
from model_server.speculation.device.tokens import WindowTokens
from model_server.vision.image import EncodedImages


@dataclass(slots=True)
class StepTimes:
    """When a step's parts were reached, by `time.perf_counter_ns`; 0: not reached."""

    # The call reached the device thread; `began`: its batch was ready; `laid_out`: its inputs; `enqueued`: its forward;
    # `sampled`: its sampling.
    called: int = field(default_factory=time.perf_counter_ns)
    began: int = 0
    laid_out: int = 0
    enqueued: int = 0
    sampled: int = 0
    # Merging batches.
    concat_ns: int | None = None
    # Drafting, before inputs.
    drafting_ns: int = 0
    # Nothing of the batch was on the device before.
    idle_ns: int = 0

    @contextlib.contextmanager
    def merging(self) -> Iterator[None]:
        """While batches are merged."""
        started = time.perf_counter_ns()
        yield
        self.concat_ns = time.perf_counter_ns() - started

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """While tokens are guessed."""
        started = time.perf_counter_ns()
        yield
        self.drafting_ns = time.perf_counter_ns() - started

    def phases(self, waited_from: int, on_host: int, done: int) -> tuple[int, ...]:
        """Return durations by `wire.step_phases.PHASES`; empty if nothing was sampled.

        Args:
            waited_from: When waiting for the device began.
            on_host: When the tokens were on the host.
            done: When their text was.
        """
        if not self.sampled:
            return ()
        return (
            self.idle_ns, self.laid_out - self.began - self.drafting_ns, self.enqueued - self.laid_out,
            self.sampled - self.enqueued, on_host - waited_from, done - on_host, self.drafting_ns,
        )  # fmt: skip


class StepTokens(Protocol):
    """The tokens of a step on its way."""

    # [num_rows] int64 on the device; of several the last.
    ids: Tensor
    # Rows may have got several.
    several: bool

    def is_over(self) -> bool:
        """Whether `to_host` would not wait."""

    def to_host(self) -> HostSampled:
        """Wait for the tokens."""


class AwaitedTokens:
    """Tokens that the pipeline's last stage samples; `ids` come with the host's."""

    def __init__(self, passage: Passage, device: torch.device) -> None:
        self.ids = torch.zeros(passage.num_rows, dtype=torch.int64, device=device)
        self.several = False
        self._passage = passage

    def is_over(self) -> bool:
        return self._passage.is_over()

    def to_host(self) -> HostSampled:
        """Wait for what all ranks need; logprobs stay on the last stage."""
        tokens = self._passage.tokens()
        # Not waited for: behind the steps of other batches that are on the device.
        self.ids.copy_(upload(torch.tensor(tokens.ids, dtype=torch.int64), self.ids.device))
        count = len(tokens.ids)
        return HostSampled(tokens.ids, [0.0] * count, [[] for _ in range(count)], tokens.failed)


@dataclass(slots=True, eq=False)
class SubmittedStep:
    """A step on the device."""

    times: StepTimes
    # Get tokens, in the order of `sampled`.
    rows: list[Sequence] = field(default_factory=list)
    sampled: StepTokens | None = None
    # Answers for requests that took no part.
    refused: list[Generation] = field(default_factory=list)
    # Requests that joined after it was submitted.
    joined_since: set[int] = field(default_factory=set)
    # Through the pipeline's stages; None without stages or rows.
    passage: Passage | None = None
    # The call's, where the next step may come before this is collected.
    number: int | None = None
    # What it brought (`seen.SeenStep`).
    seen: Future[Any] = field(default_factory=Future)
    # What was drafted for it.
    drafted: Drafted | None = None
    # Tokens of drafts made and checked on the device, at most `length` a row.
    window: WindowTokens | None = None
    length: int = 0
    # What was encoded for it.
    images: EncodedImages | None = None

    def tell_stages(self, error: BaseException) -> None:
        """Send its error to stages that wait."""
        if self.passage is not None:
            self.passage.fail(error)


@dataclass(slots=True, eq=False)
class Running:
    """A batch and its steps' state, written by the engine and `Stepper`."""

    batch: Batch
    # The tensors of its steps.
    decode: DecodeState
    # Last sampled tokens, on the device.
    newest: NewestTokens | None = None
    # The newest sampling step that is not collected.
    in_flight: SubmittedStep | None = None
    # The next step follows from what the newest brings.
    gives_several: bool = False
    # Drafts made by the device, if any.
    windows: BatchWindows | None = None
    # When the failed step that ended the batch began.
    lost_at: int | None = None

    @property
    def repeats_rows(self) -> bool:
        """Whether the next step may have the last one's rows, with tokens and slots left."""
        return self.batch.is_uniform and self.decode.repeats(self.batch.sequences)

    @property
    def needs_last_step(self) -> bool:
        """Whether the next step's tokens depend on the last one's result, seen or not."""
        return self.gives_several

    @property
    def has_open_window(self) -> bool:
        """Whether the host does not know rows' token counts yet; only a window of these can follow."""
        return self.windows is not None and self.windows.unseen > 0

    @property
    def has_run(self) -> bool:
        """A step was taken that only decodes."""
        return self.decode.has_run or self.windows is not None

    def note_other_step(self) -> None:
        """Note a step that neither `decode` nor `windows` made."""
        self.decode.note_other_step()
        self.leave_windows()

    def leave_windows(self) -> None:
        """The next step is none of `windows`."""
        if self.windows is not None:
            self.windows.state.note_other_step()

    def join(self, other: Running) -> None:
        """Join a batch without uncollected steps."""
        other.leave_windows()  # what they know of its rows goes to these
        self.batch.join(other.batch)

    def filter(self, request_ids: Iterable[int]) -> None:
        """Filter, and forget the state of rows that left."""
        if self.batch.filter(request_ids):
            self._forget_others()

    def drop(self, leaving: Callable[[Sequence], bool]) -> None:
        """Drop, and forget the state of rows that left."""
        if self.batch.drop(leaving):
            self._forget_others()

    def has_ended(self, call: StepCall) -> bool:
        """Whether all requests ended, as the router knew at the call."""
        return all(s.ended_in is not None and call.follows_answer_of(s.ended_in) for s in self.batch.sequences)

    def drop_finished(self) -> None:
        self.drop(lambda sequence: sequence.finished)

    def _forget_others(self) -> None:
        self.decode.release(self.batch.sequences)
        if self.windows is not None:
            self.windows.release(self.batch.sequences)
        if self.in_flight is None and not any(s.has_unseen for s in self.batch.sequences):
            self.newest = None
