"""The report of a run: JSON for programs, a Markdown table and a chart for people."""

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
REPLAY_COLUMNS = ("", "in the log", "in the replay")
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
    return "–" if math.isnan(seconds) else short(seconds * 1e3)


def short(value: float) -> str:
    """With two decimals below 10, one below 100, none above."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def markdown(run: Run) -> str:
    """The table with what a reader must know, to be pasted elsewhere."""
    lines = [f"**{run.heading}**", "", *pipe_table(list(COLUMNS), [row(cell) for cell in run.cells]), ""]
    if run.replayed:
        lines += [*pipe_table(REPLAY_COLUMNS, run.replayed), ""]
    prompts = [cell.prompt_tokens for cell in run.cells if cell.prompt_tokens is not None]
    if prompts and not run.replayed:
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
    unit = _common_unit([cell.load for run in runs.values() for cell in run.cells])
    panels = (
        CurvePanel("time to first token, ms", "output tokens/s", _curves(runs, "ttft", unit)),
        CurvePanel("time per output token after the first, ms", "output tokens/s", _curves(runs, "tpot", unit)),
    )
    return curve_chart(heading, panels, f"labels: {unit}" if unit else "", notes)


def _common_unit(loads: Sequence[str]) -> str:
    """What the labels of points need not repeat; empty if runs were loaded in different ways."""
    units = {"clients" if unit == "client" else unit for unit in (load.partition(" ")[2] for load in loads)}
    return units.pop() if len(units) == 1 else ""


def _curves(runs: Mapping[str, Run], latency: str, unit: str) -> list[Curve]:
    curves = []
    for number, (name, run) in enumerate(runs.items()):
        labels = [cell.load.partition(" ")[0] if unit else cell.load for cell in run.cells]
        for percentile, what in (("p50", "median"), ("p99", "99th percentile")):
            is_tail = percentile == "p99"
            points = _points(run.cells, f"{latency}_{percentile}", labels=[] if is_tail else labels)
            curves.append(Curve(f"{name} {what}".strip(), points, number, is_dashed=is_tail))
    return curves


def _points(cells: Sequence[Cell], latency: str, labels: Sequence[str]) -> list[Point]:
    """In milliseconds; no point where nothing was measured."""
    points = zip(cells, (getattr(cell, latency) for cell in cells), labels or [""] * len(cells), strict=True)
    return [Point(s * 1e3, cell.output_tokens_per_s, label) for cell, s, label in points if not math.isnan(s)]


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
