"""One table of everything that was said: measured (ratio of roofline) [peer ratio], prediction, bars.

Plain text and narrow: what comes back from a test machine may be cut after some thousand characters.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.record import Line
from benchmarks.gpu.running import MACHINE, Report
from benchmarks.gpu.stages.table import STAGES

NAME_WIDTH = 44
COLUMNS = (("measured", 13), ("roofline", 9), ("peer", 7), ("spread", 7), ("predicted", 11), ("must / aim", 17))
# Passed checks of one stage that are told one by one; of more only their number.
MOST_PASSED = 12
# Of a note or a reason; the JSON file has it whole.
DETAIL_WIDTH = 100


def header_text(report: Report) -> str:
    """Versions, card, code, and the ceilings that all ratios are shares of."""
    header, machine = report.content["header"], report.machine
    versions = ", ".join(f"{k} {v}" for k, v in header["versions"].items())
    lines = [f"code {header['git'] or 'without git'}, tree {header['tree']}; Python {header['python']}, {versions}"]
    lines.append(f"device {header['device']} {header.get('card', '')}; model {header['model'] or 'without files'}")
    if header["tiny"]:
        lines.append("TINY: toy sizes, to prove that the stages run. No figure below says anything about speed.")
    if machine is not None:
        lines.append(
            f"BW {machine['bandwidth'] / 1e12:.3g} TB/s (copy, read + write), R {machine['flops'] / 1e12:.4g} TFLOP/s, "
            f"gap per kernel {machine['gap_s'] * 1e6:.2f} us, memory {machine['memory'] / 2**20:,.0f} MiB"
        )
    return "\n".join(lines)


def text(report: Report) -> str:
    """Header and table."""
    heads = "  ".join(f"{name:>{width}}" for name, width in COLUMNS)
    rows = [header_text(report), f"{'':4}{'':{NAME_WIDTH}}  {heads}  verdict"]
    for stage in STAGES:
        result = report.content["stages"].get(stage.name)
        if result is None:
            continue
        state = result["state"] + (f": {result['why']}" if "why" in result else "")
        rows.append(
            f"{stage.name}  {stage.what} – {state}" + (f", {result['seconds']:.0f} s" if "seconds" in result else "")
        )
        rows += [f"    {row}".rstrip() for row in _rows(report.lines(stage.name))]
    return "\n".join(rows)


def _rows(lines: list[Line]) -> Iterator[str]:
    passed = [line for line in lines if line.kind == "check" and line.passed]
    brief = len(passed) > MOST_PASSED
    for line in lines:
        if line.name == MACHINE or (brief and line.kind == "check" and line.passed):
            continue
        if line.kind == "figure":
            yield from _figure(line)
        else:
            what = line.verdict or ("left out" if line.kind == "skipped" else "note")
            yield f"{what}: {line.name}" + (f": {_short(line.detail)}" if line.detail else "")
    if brief:
        yield f"passed: {len(passed)} checks"


def _figure(line: Line) -> Iterator[str]:
    name = line.name + (f" ({line.detail})" if line.detail else "")
    *before, last = textwrap.wrap(name, NAME_WIDTH) or [""]
    yield from before
    cells = (
        quantity(line.value, line.unit),
        "" if line.ratio is None else f"({line.ratio:.1%})",
        "" if line.peer is None else f"[{line.peer:.2f}x]",
        "" if line.spread is None else f"±{line.spread:.1%}",
        "" if line.predicted is None else quantity(line.predicted, line.unit),
        _bars(line),
    )
    padded = "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))
    yield f"{last:{NAME_WIDTH}}  {padded}  {line.verdict}"


def _bars(line: Line) -> str:
    if line.target is None:
        return ""
    if line.target.on == "peer":
        return f"{line.target.must:g}x / {line.target.aim:g}x"
    unit = "share" if line.target.on == "ratio" else line.unit
    return f"{quantity(line.target.must, unit)} / {quantity(line.target.aim, unit)}"


def quantity(value: float | None, unit: str) -> str:
    """Seconds as s, ms or us; shares as %; the rest with thousands separated."""
    if value is None:
        return ""
    if unit == "share":
        return f"{value:.1%}"
    if unit == "s":
        scaled, name = (value, "s") if value >= 1 else (value * 1e3, "ms") if value >= 1e-3 else (value * 1e6, "us")
        return f"{scaled:.3g} {name}"
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}".strip()


def _short(detail: str) -> str:
    return detail if len(detail) <= DETAIL_WIDTH else detail[:DETAIL_WIDTH] + "…"


def counts(report: Report) -> dict[str, Any]:
    """How many checks failed and bars were missed, for the last line and the exit status."""
    lines = [line for stage in report.content["stages"] for line in report.lines(stage)]
    return {
        "failed": sum(line.kind == "check" and not line.passed for line in lines),
        "missed": sum(line.verdict == "not met" for line in lines),
        "unfinished": [n for n, s in report.content["stages"].items() if s["state"] != "finished"],
    }
