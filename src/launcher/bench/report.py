"""A run's results on paper: JSON for machines, a Markdown table and a chart for people."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.bench.chart import Chart, svg
from launcher.bench.results import Cell

COLUMNS = (
    "load", "output tok/s", "requests/s", "TTFT p50 / p99 ms", "ITL p50 / p99 ms", "TPOT p50 ms", "requests", "errors",
)  # fmt: skip


def row(cell: Cell) -> tuple[str, ...]:
    """A line of the table, under COLUMNS."""
    short = f" ({cell.short_requests} short)" if cell.short_requests else ""
    return (
        cell.load,
        f"{cell.output_tokens_per_s:,.1f}",
        f"{cell.requests_per_s:,.2f}",
        f"{_ms(cell.ttft_p50, 1)} / {_ms(cell.ttft_p99, 1)}",
        f"{_ms(cell.itl_p50, 2)} / {_ms(cell.itl_p99, 2)}",
        _ms(cell.tpot_p50, 2),
        f"{cell.num_requests}{short}",
        str(cell.errors),
    )


def _ms(seconds: float, digits: int) -> str:
    return "–" if math.isnan(seconds) else f"{seconds * 1e3:,.{digits}f}"


def markdown(title: str, cells: Sequence[Cell], chart: str) -> str:
    """The table, with the chart's file name below it."""
    lines = [f"# {title}", "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(row(cell)) + " |" for cell in cells]
    prompts = [cell.prompt_tokens for cell in cells if cell.prompt_tokens is not None]
    if prompts:
        lines += ["", f"Prompts as the server counts them: {min(prompts):.0f} to {max(prompts):.0f} tokens on average."]
    return "\n".join([*lines, "", f"![{title}]({chart})", ""])


def prepare(folder: Path) -> None:
    """Makes the folder. Raises OSError if nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write(folder: Path, title: str, about: Mapping[str, Any], cells: Sequence[Cell]) -> list[Path]:
    """bench.json, bench.md and bench.svg in `folder`, each whole or as it was. Raises OSError."""
    report = {"title": title, **about, "cells": [cell.as_json() for cell in cells]}
    groups = [cell.load for cell in cells]
    charts = [
        Chart("output tokens/s", groups, {"": [cell.output_tokens_per_s for cell in cells]}),
        Chart("time to first token, ms", groups,
              {"p50": _bars([cell.ttft_p50 for cell in cells]), "p99": _bars([cell.ttft_p99 for cell in cells])}),
        Chart("between tokens, ms", groups,
              {"p50": _bars([cell.itl_p50 for cell in cells]), "p99": _bars([cell.itl_p99 for cell in cells])}),
    ]  # fmt: skip
    texts = {
        "bench.json": json.dumps(report, indent=1) + "\n",
        "bench.md": markdown(title, cells, "bench.svg"),
        "bench.svg": svg(charts),
    }
    for name, text in texts.items():
        partial = folder / f".{name}.part"
        partial.write_text(text)
        partial.replace(folder / name)
    return [folder / name for name in texts]


def _bars(seconds: Sequence[float]) -> list[float | None]:
    """In milliseconds; no bar where nothing was measured."""
    return [None if math.isnan(value) else value * 1e3 for value in seconds]
