"""What all steps have in common: the forward, the choice of tokens, and the host's share."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_server.batch.results import Generation
from model_server.batch.sequence import Sequence
from model_server.distributed.stage_links import Passage, StageTokens
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.watcher import ComputedStep
from model_server.memory.transfer import upload
from model_server.runner.runner import Kept, ModelInputs
from model_server.sampling.sampler import HostSampled


class StepTokens(Protocol):
    """The tokens of a step on its way."""

    # [num_rows] int64 on the device; of several the last.
    ids: Tensor

    def is_over(self) -> bool:
        """Whether `to_host` would not wait."""

    def to_host(self) -> HostSampled:
        """Wait for the tokens."""


class AwaitedTokens:
    """Tokens that the pipeline's last stage samples; `ids` come with the host's."""

    def __init__(self, passage: Passage, device: torch.device) -> None:
        self.ids = torch.zeros(passage.num_rows, dtype=torch.int64, device=device)
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


@dataclass(frozen=True, slots=True)
class Collected:
    """What a step brought; times by `time.perf_counter_ns`."""

    generations: list[Generation]
    # Of features.
    reports: tuple[object, ...]
    waited_from: int
    on_host: int
    done: int


class Step(ABC):
    """One forward of a batch, submitted to the device and collected later; `inputs()` lays out what it reads."""

    # The batch's next step depends on what this one brings.
    decides_next = False

    def __init__(self, context: StepContext, rows: list[Sequence], passage: Passage | None, times: StepTimes) -> None:
        """Take what every kind needs.

        Args:
            rows: Get tokens.
            passage: Through the pipeline's stages, if there are several.
        """
        self.context = context
        self.rows = rows
        self.passage = passage
        self.times = times
        # Of `rows`, once submitted; None: nothing is sampled.
        self.sampled: StepTokens | None = None
        self._collected: Collected | BaseException | None = None

    @property
    def is_collected(self) -> bool:
        return self._collected is not None

    @abstractmethod
    def submit(self, previous: Step | None) -> None:
        """Enqueue the forward and the sampling, and move the rows on.

        Args:
            previous: The batch's last step, if not collected.
        """

    def collect(self) -> Collected:
        """Wait for the tokens and give them to the sequences; later calls repeat the first result or error."""
        if self._collected is None:
            try:
                self._collected = self._collect()
            except BaseException as error:
                self._collected = error
        if isinstance(self._collected, BaseException):
            raise self._collected
        return self._collected

    def fail(self, error: BaseException) -> None:
        """Send its error to stages that wait."""
        if self.passage is not None:
            self.passage.fail(error)

    def forward(self, inputs: ModelInputs, kept: Kept | None) -> Tensor:
        """Enqueue the forward of this stage; return logits, or what the next stage reads."""
        self.times.laid_out = time.perf_counter_ns()
        context, passage = self.context, self.passage
        if kept is not None:
            inputs = dataclasses.replace(inputs, kept=kept)
        if passage is not None:
            with context.phase("receive"):
                inputs = dataclasses.replace(inputs, hidden=passage.receive(inputs.positions.shape[-1]))
        with context.phase("forward"):
            logits = context.runner.forward(inputs, context.cache)
        if passage is not None:
            passage.send(logits)
        self.times.enqueued = time.perf_counter_ns()
        return logits

    def sample(self, logits: Tensor, previous: Step | None) -> None:
        """Choose a token for each row; a stage that is not the last awaits them."""
        if self.passage is not None and not self.passage.is_last:
            self.sampled = AwaitedTokens(self.passage, self.context.device)
        elif self.rows:
            if previous is not None and any(s.row.grammar is not None and s.has_unseen for s in self.rows):
                previous.collect()  # the masks follow from its tokens
            with self.context.phase("sampling"):
                self.sampled = self.context.sampler.sample(logits, [s.row for s in self.rows])
        if self.rows:
            self.times.sampled = time.perf_counter_ns()

    def computed(self, inputs: ModelInputs, kept: Kept | None) -> ComputedStep:
        """Return what watchers learn from the step."""
        newest = None if self.sampled is None else self.sampled.ids
        return ComputedStep(inputs, kept, newest, self.context.staging)

    def accept(self, host: HostSampled) -> tuple[object, ...]:
        """Note what the sequences got, and return reports."""
        return ()

    def _collect(self) -> Collected:
        waited_from = time.perf_counter_ns()
        with self.context.phase("wait"):
            host = None if self.sampled is None else self.sampled.to_host()
        on_host = time.perf_counter_ns()
        if self.passage is not None:
            self.passage.reply(StageTokens([], []) if host is None else StageTokens(host.ids, host.failed))
        with self.context.phase("text"):
            generations = [] if host is None else self.context.answers.step(self.rows, host)
        reports = () if host is None else self.accept(host)
        return Collected(generations, reports, waited_from, on_host, time.perf_counter_ns())
