"""What every step of an engine works with, and when its parts were reached."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from model_server.batch.decode_state import DecodeState
from model_server.batch.feature import ModelFeature
from model_server.distributed.stage_links import StageLinks
from model_server.engine.answers import Answers
from model_server.engine.profile import NoProfiler, StepProfiler
from model_server.engine.steps.watcher import StepWatcher
from model_server.errors import RequestError
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.runner import Runner
from model_server.sampling.sampler import Sampler


@dataclass(slots=True, kw_only=True)
class StepContext:
    """The model and what runs it; only the engine changes it."""

    runner: Runner
    sampler: Sampler
    answers: Answers
    device: torch.device
    staging: Staging
    block_size: int
    # Running requests may get more blocks.
    grows: bool
    # To other stages of a pipeline.
    links: StageLinks | None = None
    # Of a feature that makes steps.
    watcher: StepWatcher | None = None
    features: tuple[ModelFeature, ...] = ()
    profiler: StepProfiler | NoProfiler = field(default_factory=NoProfiler)
    warmed_cache: KvCache | None = None

    @property
    def cache(self) -> KvCache:
        """The KV memory.

        Raises:
            RequestError: There is none before a warm-up.
        """
        if self.warmed_cache is None:
            raise RequestError("the shard has not been warmed up")
        return self.warmed_cache

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return a span of the trace, if one is taken."""
        return self.profiler.phase(name)

    def decode_state(self) -> DecodeState:
        """Return the tensors of a batch that has taken no step."""
        return DecodeState(self.device, self.block_size, self.staging, self.features)


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
    # Guessing tokens, before inputs.
    guessing_ns: int = 0
    # Nothing of the batch was on the device before.
    idle_ns: int = 0

    @contextlib.contextmanager
    def merging(self) -> Iterator[None]:
        """While batches are merged."""
        started = time.perf_counter_ns()
        yield
        self.concat_ns = time.perf_counter_ns() - started

    @contextlib.contextmanager
    def guessing(self) -> Iterator[None]:
        """While tokens are guessed."""
        started = time.perf_counter_ns()
        yield
        self.guessing_ns = time.perf_counter_ns() - started

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
            self.idle_ns, self.laid_out - self.began - self.guessing_ns, self.enqueued - self.laid_out,
            self.sampled - self.enqueued, on_host - waited_from, done - on_host, self.guessing_ns,
        )  # fmt: skip
