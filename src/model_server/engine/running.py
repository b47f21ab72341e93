"""A batch on the shard, what its steps keep between two calls, and a step that is on the device."""

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
    """When the parts of a step were reached on the host, by `time.perf_counter_ns`; 0: not reached.

    called: the call reached the device thread. began: its batch was put together. laid_out: its inputs were. enqueued:
    its forward was. sampled: its sampling was, too. concat_ns: how long merging batches took. drafting_ns: how long
    drafting did, before inputs were laid out. idle_ns: how long the batch waited, with nothing of it on the device,
    before the step began.
    """

    called: int = field(default_factory=time.perf_counter_ns)
    began: int = 0
    laid_out: int = 0
    enqueued: int = 0
    sampled: int = 0
    concat_ns: int | None = None
    drafting_ns: int = 0
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
        """Durations in the order of `wire.step_phases.PHASES`; empty for a step that sampled nothing.

        waited_from, on_host, done: when waiting for the device began, when its tokens were on the host, and their text.
        """
        if not self.sampled:
            return ()
        return (
            self.idle_ns, self.laid_out - self.began - self.drafting_ns, self.enqueued - self.laid_out,
            self.sampled - self.enqueued, on_host - waited_from, done - on_host, self.drafting_ns,
        )  # fmt: skip


class StepTokens(Protocol):
    """The tokens of a step that is on its way. The engine's own are `sampling.sampler.Sampled`.

    ids: [num_rows] int64 on the device; where a row got several, its last. several: rows may have got several.
    """

    ids: Tensor
    several: bool

    def is_over(self) -> bool:
        """Whether `to_host` would not wait."""

    def to_host(self) -> HostSampled:
        """Wait for the step and hand out its tokens."""


class AwaitedTokens:
    """The tokens of a step that the last stage of the pipeline samples. `ids` holds them once they are on the host."""

    def __init__(self, passage: Passage, device: torch.device) -> None:
        self.ids = torch.zeros(passage.num_rows, dtype=torch.int64, device=device)
        self.several = False
        self._passage = passage

    def is_over(self) -> bool:
        return self._passage.is_over()

    def to_host(self) -> HostSampled:
        """Only what all ranks must know: logprobs and top tokens stay on the last stage, which answers."""
        tokens = self._passage.tokens()
        # Not waited for: behind the steps of other batches that are on the device.
        self.ids.copy_(upload(torch.tensor(tokens.ids, dtype=torch.int64), self.ids.device))
        count = len(tokens.ids)
        return HostSampled(tokens.ids, [0.0] * count, [[] for _ in range(count)], tokens.failed)


@dataclass(slots=True, eq=False)
class SubmittedStep:
    """A step on the device. `rows`: the sequences that get tokens in it, in the order of `sampled`; `refused`: answers
    for requests that took no part in it; `joined_since`: requests that came into its batch after it was submitted;
    `passage`: its way through the stages of the pipeline, None without stages or without rows; `number`: its call's,
    where the next step may be submitted before this one is collected; `seen`: what it brought (`seen.SeenStep`);
    `drafted`: what was drafted for it; `window`: its tokens where the device made and checked drafts, `length` of them
    for each row at most; `images`: what was encoded for it."""

    times: StepTimes
    rows: list[Sequence] = field(default_factory=list)
    sampled: StepTokens | None = None
    refused: list[Generation] = field(default_factory=list)
    joined_since: set[int] = field(default_factory=set)
    passage: Passage | None = None
    number: int | None = None
    seen: Future[Any] = field(default_factory=Future)
    drafted: Drafted | None = None
    window: WindowTokens | None = None
    length: int = 0
    images: EncodedImages | None = None

    def tell_stages(self, error: BaseException) -> None:
        """What went wrong in it, where other stages wait for it."""
        if self.passage is not None:
            self.passage.fail(error)


@dataclass(slots=True, eq=False)
class Running:
    """A batch and the state of its steps, which the engine and its `Stepper` write.

    decode: the tensors of its steps. newest: the tokens sampled last, on the device. in_flight: the newest step that
    sampled something and is not collected. gives_several: the next step follows from what the newest brings. windows:
    of drafts that the device makes; None: there was none. lost_at: when the step began whose failure ended the batch.
    """

    batch: Batch
    decode: DecodeState
    newest: NewestTokens | None = None
    in_flight: SubmittedStep | None = None
    gives_several: bool = False
    windows: BatchWindows | None = None
    lost_at: int | None = None

    @property
    def repeats_rows(self) -> bool:
        """The next decode step may have the rows of the last one: all have tokens left and slots for them."""
        return self.batch.is_uniform and self.decode.repeats(self.batch.sequences)

    @property
    def needs_last_step(self) -> bool:
        """No step of the batch can be submitted before the one before it has been collected: how many tokens it
        computes follows from that one. Whether the host has seen it makes no difference."""
        return self.gives_several

    @property
    def has_open_window(self) -> bool:
        """The host does not know how many tokens rows have: until it does, only a window of these rows can follow."""
        return self.windows is not None and self.windows.unseen > 0

    @property
    def has_run(self) -> bool:
        """A step was taken that only decodes."""
        return self.decode.has_run or self.windows is not None

    def note_other_step(self) -> None:
        """A step is submitted that neither `decode` nor `windows` made."""
        self.decode.note_other_step()
        self.leave_windows()

    def leave_windows(self) -> None:
        """The next step is none of `windows`."""
        if self.windows is not None:
            self.windows.state.note_other_step()

    def join(self, other: Running) -> None:
        """As `Batch.join`, of a batch without steps that are not collected, which has no next one."""
        other.leave_windows()  # what they know of its rows goes to these
        self.batch.join(other.batch)

    def filter(self, request_ids: Iterable[int]) -> None:
        """As `Batch.filter`, and forget the state of those that left."""
        if self.batch.filter(request_ids):
            self._forget_others()

    def drop(self, leaving: Callable[[Sequence], bool]) -> None:
        """As `Batch.drop`, and forget the state of those that left."""
        if self.batch.drop(leaving):
            self._forget_others()

    def has_ended(self, call: StepCall) -> bool:
        """All its requests have, and the router knew when it sent the call."""
        return all(s.ended_in is not None and call.follows_answer_of(s.ended_in) for s in self.batch.sequences)

    def drop_finished(self) -> None:
        """As `drop`, of those that have ended."""
        self.drop(lambda sequence: sequence.finished)

    def _forget_others(self) -> None:
        self.decode.release(self.batch.sequences)
        if self.windows is not None:
            self.windows.release(self.batch.sequences)
        if self.in_flight is None and not any(s.has_unseen for s in self.batch.sequences):
            self.newest = None
