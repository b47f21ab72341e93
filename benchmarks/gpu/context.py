"""What a stage is given: the device, how large it may be, how long it may take, and where its lines go."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch

from benchmarks.gpu.measuring.roofline import Machine
from benchmarks.gpu.measuring.targets import TARGETS
from benchmarks.gpu.record import Line, Target


@dataclass(slots=True)
class Context:
    """machine: what S0 measured; None while S0 runs. model: a folder instead of the shapes without files. deadline: of
    `time.monotonic`; a stage asks `has_time` before each of its cells."""

    device: torch.device
    tiny: bool
    deadline: float
    lines: TextIO
    machine: Machine | None = None
    model: Path | None = None
    seed: int = field(default_factory=lambda: time.time_ns() % 2**31)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def ceilings(self) -> Machine:
        """Raises RuntimeError before S0 has run."""
        if self.machine is None:
            raise RuntimeError("the ceilings of this machine are not known: S0 runs first")
        return self.machine

    def has_time(self, seconds: float) -> bool:
        """Whether a cell that takes so long still fits; in tiny mode cells take next to nothing."""
        return self.deadline - time.monotonic() > (0.0 if self.tiny else seconds)

    def emit(self, line: Line) -> None:
        """Write it down at once: what a stage has said stays even if it is ended."""
        self.lines.write(line.to_text() + "\n")
        self.lines.flush()

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        ratio: float | None = None,
        spread: float | None = None,
        predicted: float | None = None,
        peer: float | None = None,
        target: Target | str | None = None,
        detail: str = "",
    ) -> None:
        """target: a bar, or the name of one in TARGETS where that differs from the figure's own. Toys have none."""
        if self.tiny:
            target = None
        elif not isinstance(target, Target):
            target = TARGETS.get(target or name)
        self.emit(Line("figure", name, value, unit, ratio, spread, predicted, peer, target, detail=detail))

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.emit(Line("check", name, passed=bool(passed), detail=detail))

    def note(self, name: str, detail: str) -> None:
        self.emit(Line("note", name, detail=detail))

    def skip(self, name: str, why: str) -> None:
        self.emit(Line("skipped", name, detail=why))
