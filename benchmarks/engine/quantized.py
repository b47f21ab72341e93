"""The engine's steps with quantized weights beside bfloat16: a process for each, which measure in turns."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.engine.compare import Side, in_turns
from benchmarks.engine.steps import Cell
from benchmarks.peers.machine import processor

BASE = "bfloat16"


@dataclass(frozen=True)
class Result:
    """Milliseconds of a step with its choice, the quickest and the median run; ratio, median_ratio: how many times as
    quick as bfloat16 it is."""

    shape: str
    precision: str
    cell: str
    ms: float
    median_ms: float
    ratio: float
    median_ratio: float


def results_of(shape: str, cell: str, times: dict[str, list[float]]) -> list[Result]:
    """times: of each precision, milliseconds of each run."""
    quickest, middle = min(times[BASE]), statistics.median(times[BASE])
    return [
        Result(shape, precision, cell, best, median, quickest / best, middle / median)
        for precision, runs in times.items()
        for best, median in [(min(runs), statistics.median(runs))]
    ]


def measure(
    shapes: Sequence[str], precisions: Sequence[str], cells: Sequence[Cell], *, seconds: float, turns: int,
    cpu_time: bool, out: Path,
) -> None:  # fmt: skip
    """Of `precisions` beside bfloat16; seconds: of each for each cell, in `turns` parts. The JSON file is written anew
    after each shape, the Markdown table printed at the end."""
    results: list[Result] = []
    names = [BASE, *(p for p in precisions if p != BASE)]
    threads = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        sides: list[Side] = []
        try:
            for name in names:  # one after the other: they would load at each other's cost
                sides.append(Side(shape, name, {}, cpu_time=cpu_time))
            threads = sides[0].threads
            for cell in cells:
                times = in_turns(sides, cell, seconds, turns)
                found = results_of(shape, cell.label, dict(zip(names, times, strict=True)))
                words = ", ".join(f"{r.precision} {r.ms:.2f} ms ({r.ratio:.2f})" for r in found)
                print(f"{shape} {cell.label}: {words}", flush=True)
                results += found
        finally:
            for side in sides:
                side.close()
        report = {"processor": processor(), "threads": threads, "cells": [asdict(r) for r in results]}
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{processor()}, {threads} threads\n\n{markdown(results)}")


def markdown(results: Sequence[Result]) -> str:
    """A row for each precision of each shape: milliseconds of the quickest run, and the ratio to bfloat16."""
    cells = list(dict.fromkeys(r.cell for r in results))
    rows: dict[str, dict[str, str]] = {}
    for r in results:
        text = f"{r.ms:.1f} ms" if r.precision == BASE else f"{r.ms:.1f} ms, {r.ratio:.2f}"
        rows.setdefault(f"{r.shape}, {r.precision}", {})[r.cell] = text
    head = ["| | " + " | ".join(cells) + " |", "|---|" + "---:|" * len(cells)]
    return "\n".join(head + [f"| {name} | " + " | ".join(row[c] for c in cells) + " |" for name, row in rows.items()])
