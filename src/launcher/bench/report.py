"""A run on paper: JSON for programs, a Markdown table and a chart for people."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.bench.chart.curves import Curve, CurvePanel, Point, curve_chart
from launcher.bench.results import Cell
from launcher.bench.run import Run

# Column -> its shorter name on a terminal of 80 columns, None where there is no place for it.
COLUMNS = {
    "load": "load", "output tok/s": "tok/s", "requests/s": "req/s", "TTFT p50 / p99 ms": "TTFT ms\np50 / p99",
    "TPOT p50 / p99 ms": "TPOT ms\np50 / p99", "ITL p50 / p99 ms": None, "requests": "requests",
}  # fmt: skip
LEGEND = "TTFT: time to first token; TPOT: time per output token after the first; ITL: time between events of a stream."


def row(cell: Cell) -> tuple[str, ...]:
    """A line of the table, under COLUMNS."""
    counts = [f"{cell.num_requests}"]
    counts += [f"{cell.short_requests} short"] if cell.short_requests else []
    counts += [f"{cell.errors} failed"] if cell.errors else []
    return (
        cell.load,
        f"{cell.output_tokens_per_s:,.1f}",
        f"{cell.requests_per_s:,.2f}",
        f"{milliseconds(cell.ttft_p50)} / {milliseconds(cell.ttft_p99)}",
        f"{milliseconds(cell.tpot_p50)} / {milliseconds(cell.tpot_p99)}",
        f"{milliseconds(cell.itl_p50)} / {milliseconds(cell.itl_p99)}",
        ", ".join(counts),
    )


def milliseconds(seconds: float) -> str:
    """With two decimals below 10 ms, one below 100 ms."""
    value = seconds * 1e3
    return "–" if math.isnan(seconds) else f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def markdown(run: Run) -> str:
    """The table with what a reader must know, to be pasted elsewhere."""
    lines = [f"**{run.heading}**", "", *pipe_table(list(COLUMNS), [row(cell) for cell in run.cells]), ""]
    prompts = [cell.prompt_tokens for cell in run.cells if cell.prompt_tokens is not None]
    if prompts:
        lines.append(f"Prompts as the server counts them: {min(prompts):.0f} to {max(prompts):.0f} tokens on average.")
    return "\n".join([*lines, LEGEND, *(f"{line}  " for line in _notes_in_markdown(run)), ""])


def pipe_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table: the first column to the left, numbers to the right."""
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in rows)]


def _notes_in_markdown(run: Run) -> list[str]:
    return [f"`{note}`" if note == run.command else note for note in run.notes]


def chart(heading: str, runs: Mapping[str, Run], notes: Sequence[str]) -> str:
    """Throughput against latency, as SVG. runs: name in the chart, empty for a single run, -> run."""
    panels = (
        CurvePanel("time to first token, ms", "output tokens/s", _curves(runs, "ttft_p50", "ttft_p99")),
        CurvePanel("time per output token after the first, ms", "output tokens/s",
                   _curves(runs, "tpot_p50", "tpot_p99")),
    )  # fmt: skip
    return curve_chart(heading, panels, notes)


def _curves(runs: Mapping[str, Run], median: str, tail: str) -> list[Curve]:
    return [
        Curve(f"{name} {what}".strip(), _points(run.cells, field, labelled=not is_tail), number, is_dashed=is_tail)
        for number, (name, run) in enumerate(runs.items())
        for field, what, is_tail in ((median, "median", False), (tail, "99th percentile", True))
    ]


def _points(cells: Sequence[Cell], latency: str, *, labelled: bool) -> list[Point]:
    """In milliseconds; no point where nothing was measured."""
    times = [(cell, getattr(cell, latency)) for cell in cells]
    return [
        Point(seconds * 1e3, cell.output_tokens_per_s, cell.load if labelled else "")
        for cell, seconds in times
        if not math.isnan(seconds)
    ]


def prepare(folder: Path) -> None:
    """Makes the folder. Raises OSError if nothing can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def write(folder: Path, run: Run) -> None:
    """bench.json, bench.md and bench.svg in `folder`. Raises OSError."""
    write_texts(folder, {
        "bench.json": json.dumps({"title": run.heading, **run.as_json()}, indent=1) + "\n",
        "bench.md": markdown(run) + f"\n![{run.heading}](bench.svg)\n",
        "bench.svg": chart(run.heading, {"": run}, run.notes),
    })  # fmt: skip


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Each file whole or as it was. Raises OSError."""
    for name, text in texts.items():
        partial = folder / f".{name}.part"
        partial.write_text(text)
        partial.replace(folder / name)
