"""`--profile`: some steps as a trace for chrome://tracing and Perfetto; only the device thread's work."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from wire.text.counting import counted

logger = logging.getLogger(__name__)

# Steps before the trace begins: the first ones compile, fill caches and see few requests.
SKIPPED_STEPS = 20

_NOTHING: AbstractContextManager[object] = nullcontext()


class StepProfiler:
    """Traces `num_steps` steps, once; on the device thread."""

    def __init__(self, folder: Path, rank: int, num_steps: int, device: torch.device) -> None:
        """Make the folder of the trace, rank-<rank>.json."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"rank-{rank}.json"
        self._num_steps = num_steps
        self._activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._steps = 0
        self._running: profile | None = None

    def step(self) -> None:
        """A step begins."""
        self._steps += 1
        if self._steps == SKIPPED_STEPS + 1:
            logger.info("Profiling starts: %s", counted(self._num_steps, "step"))
            self._running = profile(activities=self._activities)
            self._running.start()
        elif self._running is not None and self._steps > SKIPPED_STEPS + self._num_steps:
            running, self._running = self._running, None
            running.stop()
            running.export_chrome_trace(str(self._file))
            logger.info("Wrote the trace %s", self._file)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return a span, while a trace is taken."""
        return _NOTHING if self._running is None else record_function(name)


class NoProfiler:
    """The profiler without `--profile`."""

    def step(self) -> None:
        """Nothing is counted."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Nothing is traced."""
        return _NOTHING
