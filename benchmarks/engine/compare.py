"""The engine's steps in two configurations on one machine: two processes that measure in turns, a table of both."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engine.steps import Cell
from benchmarks.peers.machine import processor

ROOT = Path(__file__).parents[2]
# A ratio from which on our side counts as no slower.
LEVEL = 0.97


@dataclass(frozen=True)
class Comparison:
    """What is compared. ours, theirs: variables of each side. seconds: of each side for each cell, in `turns` parts."""

    models: Sequence[str]
    dtypes: Sequence[str]
    cells: Sequence[Cell]
    ours: Mapping[str, str]
    theirs: Mapping[str, str]
    seconds: float
    turns: int
    cpu_time: bool


@dataclass(frozen=True)
class Result:
    """Milliseconds of a step with its choice: the quickest and the median run of each side."""

    model: str
    dtype: str
    cell: str
    ours_ms: float
    theirs_ms: float
    ours_median_ms: float
    theirs_median_ms: float

    @classmethod
    def of(cls, model: str, dtype: str, cell: str, ours: Sequence[float], theirs: Sequence[float]) -> Result:
        middles = statistics.median(ours), statistics.median(theirs)
        return cls(model, dtype, cell, min(ours), min(theirs), *middles)

    @property
    def ratio(self) -> float:
        """How many times as quick as theirs ours is. Of the quickest runs: a busy machine only makes runs slower."""
        return self.theirs_ms / self.ours_ms

    @property
    def median_ratio(self) -> float:
        return self.theirs_median_ms / self.ours_median_ms


class Side:
    """A child process with the model loaded."""

    def __init__(self, model: str, dtype: str, variables: Mapping[str, str], *, cpu_time: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.engine.child", model, dtype, "cpu" if cpu_time else "wall"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **variables}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.threads: int = self._answer()["threads"]

    def measure(self, cell: Cell, seconds: float) -> list[float]:
        """Milliseconds of each run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**asdict(cell), "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        return [float(time) for time in self._answer()]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side of the comparison ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def in_turns(sides: Sequence[Side], cell: Cell, seconds: float, turns: int) -> list[list[float]]:
    """Milliseconds of each run of each side: `seconds` of each, in `turns` parts, every other turn backwards."""
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(turns):
        for place in range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides))):
            times[place].extend(sides[place].measure(cell, seconds / turns))
    return times


def compare(asked: Comparison, out: Path) -> None:
    """Measure, print a table as each model is done, and write JSON to `out`."""
    results: list[Result] = []
    heading = f"{processor()}; {_words(asked.ours) or 'default'} beside {_words(asked.theirs)}"
    for model in asked.models:
        for dtype in asked.dtypes:
            found, threads = _model(asked, model, dtype)
            results += found
            Console(width=110).print(_table(f"{heading}; {threads} threads", found))
    level = sum(r.ratio >= LEVEL for r in results)
    print(f"{level} of {len(results)} cells at least {LEVEL} of the other side")
    variables = {"ours": dict(asked.ours), "theirs": dict(asked.theirs)}
    report = {"processor": processor(), **variables, "cells": [asdict(r) | {"ratio": r.ratio} for r in results]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


def _model(asked: Comparison, model: str, dtype: str) -> tuple[list[Result], int]:
    sides: list[Side] = []
    try:
        for variables in (asked.ours, asked.theirs):  # one after the other: they would load at each other's cost
            sides.append(Side(model, dtype, variables, cpu_time=asked.cpu_time))
        results = []
        for cell in asked.cells:
            times = in_turns(sides, cell, asked.seconds, asked.turns)
            results.append(Result.of(Path(model).name, dtype, cell.label, *times))
        return results, sides[0].threads
    finally:
        for side in sides:
            side.close()


def _table(title: str, results: Sequence[Result]) -> Table:
    table = Table(title=title)
    for column in ("model", "type", "step", "ours, ms", "theirs, ms", "theirs / ours", "of medians"):
        table.add_column(column, justify="left" if column in ("model", "type", "step") else "right")
    for r in results:
        times = f"{r.ours_ms:.2f}", f"{r.theirs_ms:.2f}", f"{r.ratio:.2f}", f"{r.median_ratio:.2f}"
        table.add_row(r.model, r.dtype, r.cell, *times)
    return table


def _words(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())
