"""The table of a comparison: medians of the repeats, the better plain precision of each server, our ratios, the
roofline; plain weights, int8 and int4 in rows of their own."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.checkpoints import num_parameters
from benchmarks.peers.quantized import BITS, GGUF_TYPES, arithmetic, weights_of
from launcher.bench.chart.bars import BarPanel, bar_chart

US = "tercet"
QUIET_CORES = 0.1
_ORDER = ("plain", *BITS)

Results = dict[str, Any]
Machine = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One server's place in a cell of the table: medians of the repeats.

    rate: output tokens/s; ttft: seconds to the first token; of_roofline: see there.
    """

    rate: float
    precision: str
    repeats: int
    ttft: float
    of_roofline: float


def fault(cell: dict[str, Any]) -> str:
    """Why a measured cell does not count; empty if it does."""
    if cell["errors"]:
        return f"{cell['errors']} errors"
    others = cell.get("other_cores", 0.0)
    return "" if others < QUIET_CORES else f"other processes used {others:.2f} cores"


def best(results: Results, peer: str, shape: str, cell: str, weights: str = "plain") -> Entry | None:
    """With the precision of those weights that gave most output tokens/s."""
    found = []
    for precision in sorted({r["precision"] for r in results["runs"] if weights_of(r["precision"]) == weights}):
        runs = [
            r for r in results["runs"]
            if (r["peer"], r["shape"], r["precision"]) == (peer, shape, precision)
            and cell in r["cells"] and not fault(r["cells"][cell])
        ]  # fmt: skip
        if runs:
            rate = statistics.median(r["cells"][cell]["output_tokens_per_s"] for r in runs)
            found.append(
                Entry(
                    rate=rate,
                    precision=precision,
                    repeats=len(runs),
                    ttft=statistics.median(r["cells"][cell]["ttft_p50"] for r in runs),
                    of_roofline=rate / roofline(limits(results), shape, cell, precision),
                )
            )
    return max(found, key=lambda entry: entry.rate, default=None)


def limits(results: Results) -> Machine:
    """The best that any look at the machine found, each number by itself: neighbours can only take from it. Older files
    have one look for all runs."""
    looks = _looks(results)
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for kind, layouts in ((kind, layouts) for look in looks for kind, layouts in look["flop_per_s"].items()):
        for layout, by_rows in layouts.items():
            best_of = rates.setdefault(kind, {}).setdefault(layout, {})
            best_of.update({n: max(rate, best_of.get(n, 0.0)) for n, rate in by_rows.items()})
    bandwidths = {name: max(look[name] for look in looks) for name in ("read_bytes_per_s", "copy_bytes_per_s")}
    return looks[0] | bandwidths | {"flop_per_s": rates}


def _looks(results: Results) -> list[Machine]:
    return [run.get("machine") or results["machine"] for run in results["runs"]]


def roofline(machine: Machine, shape: str, cell: str, precision: str) -> float:
    """Output tokens/s if nothing but the matrix products were there: weights over bandwidth, or FLOPs over rate,
    whichever takes longer, for each step; and the prompt's FLOPs over the rate, the head only for its last token.

    The bandwidth is the better of reading and copying, the rate the best that any of the measured products reached: a
    library that does worse with few rows is no limit of the machine. Where the processor has no instructions for it,
    bfloat16 is multiplied as float32, so that the better rate of the two counts. Quantized weights are held to the same
    rates; the head is read as bfloat16 beside them, of a GGUF file in as many bits as they.
    """
    prompt, rest = cell.split("->")
    output, rows = (int(part) for part in rest.split(" c="))
    total, head = num_parameters(shape)
    itemsize = 4 if arithmetic(precision) == "float32" else 2
    bits = BITS.get(weights_of(precision), 8 * itemsize)
    head_bits = bits if precision in GGUF_TYPES else 8 * itemsize
    num_bytes = ((total - head) * bits + head * head_bits) / 8
    kinds = ("float32",) if itemsize == 4 else ("float32", "bfloat16")
    rate = max(r for kind in kinds for by_rows in machine["flop_per_s"][kind].values() for r in by_rows.values())
    bandwidth = max(machine["read_bytes_per_s"], machine["copy_bytes_per_s"])
    step = max(num_bytes / bandwidth, 2 * total * rows / rate)
    prefill = rows * 2 * ((total - head) * int(prompt) + head) / rate
    return float(rows * output / (prefill + (output - 1) * step))


def _rows(results: Results) -> Iterator[tuple[str, str, dict[str, Entry | None]]]:
    """What is compared (a shape, for quantized weights with their name), the cell, and each server's entry."""
    runs = results["runs"]
    cells = sorted({c for r in runs for c in r["cells"]}, key=_lengths)
    for shape in dict.fromkeys(r["shape"] for r in runs):
        for weights in sorted({weights_of(r["precision"]) for r in runs if r["shape"] == shape}, key=_ORDER.index):
            name = shape if weights == "plain" else f"{shape}, {weights}"
            for cell in cells:
                yield name, cell, {peer: best(results, peer, shape, cell, weights) for peer in _peers(results)}


def _peers(results: Results) -> list[str]:
    return list(dict.fromkeys(r["peer"] for r in results["runs"]))


def _lengths(cell: str) -> tuple[int, ...]:
    """A cell's place in the table: prompt, output, clients."""
    return tuple(int(number) for number in re.findall(r"\d+", cell))


def lines(results: Results) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table."""
    peers = _peers(results)
    others = [peer for peer in peers if peer != US]
    ratios = [f"{US} / {peer}" for peer in others]
    head = ["shape", "cell", *peers, *ratios, "of roofline", "TTFT p50 ms: tercet", "best peer"]
    rows = []
    for name, cell, by_peer in _rows(results):
        ours = by_peer.get(US)
        rivals = [entry for peer in others if (entry := by_peer[peer]) is not None]
        rows.append([
            name, cell,
            *("–" if e is None else f"{e.rate:.1f} {e.precision} ({e.repeats})" for e in by_peer.values()),
            *("–" if ours is None or (e := by_peer[peer]) is None else f"{ours.rate / e.rate:.2f}" for peer in others),
            "–" if ours is None else f"{ours.of_roofline:.0%}",
            "–" if ours is None else f"{1e3 * ours.ttft:.0f}",
            f"{1e3 * min(entry.ttft for entry in rivals):.0f}" if rivals else "–",
        ])  # fmt: skip
    return head, rows


_LEGEND = "output tokens/s: median, the better precision of those measured, number of repeats"
_QUANTIZED = (
    f"int8 is {US}'s `--quantize eetq`, llama.cpp's Q8_0 and OpenVINO's int8; int4 is gptq in groups of 128 in {US}, "
    "Q4_K_M in llama.cpp and int4 in groups of 128 in OpenVINO. The head is bfloat16, Q8_0 or Q6_K, and int8."
)
_GGUF = "Of q8_0 and q4_k_m both read the same GGUF file, with head and embedding as llama.cpp's tools leave them."


def show(results: Results) -> None:
    head, rows = lines(results)
    table = Table(title=_LEGEND)
    for column in head:
        table.add_column(column, justify="left" if column in ("shape", "cell") else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=190).print(table)


def write(results: Results, out: Path) -> None:
    """The Markdown table and the chart beside the JSON file."""
    head, rows = lines(results)
    weights = {weights_of(r["precision"]) for r in results["runs"]}
    notes = [_QUANTIZED] * bool(weights & {"int8", "int4"}) + [_GGUF] * bool(weights & set(GGUF_TYPES))
    versions = dict.fromkeys(f"{r['peer']} {r['version']}" for r in results["runs"])
    text = [
        *_about_machine(results),
        "",
        " ".join([f"Servers: {', '.join(versions)}. {_LEGEND.capitalize()}.", *notes]),
        "",
        "| " + " | ".join(head) + " |",
        "|---|---|" + "---:|" * (len(head) - 2),
        *("| " + " | ".join(row) + " |" for row in rows),
        *_notes(results),
        "",
        f"![output tokens/s]({out.stem}.svg)",
        "",
    ]
    out.with_suffix(".md").write_text("\n".join(text))
    panels = []
    by_name: dict[str, list[tuple[str, dict[str, Entry | None]]]] = {}
    for name, cell, by_peer in _rows(results):
        by_name.setdefault(name, []).append((cell, by_peer))
    for name, cells in by_name.items():
        values = {p: [None if (e := by[p]) is None else e.rate for _, by in cells] for p in _peers(results)}
        panels.append(BarPanel(f"{name}: output tokens/s", [cell for cell, _ in cells], values))
    out.with_suffix(".svg").write_text(bar_chart(panels))


def _about_machine(results: Results) -> list[str]:
    def spread(name: str) -> str:
        values = [look[name] / 1e9 for look in _looks(results)]
        low, high = f"{min(values):.1f}", f"{max(values):.1f}"
        return low if low == high else f"{low} to {high}"

    machine = limits(results)
    rates = machine["flop_per_s"]
    counts = list(rates["float32"]["plain"])
    return [
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}: memory read "
        f"{spread('read_bytes_per_s')} GB/s, copy {spread('copy_bytes_per_s')} GB/s over all runs, of which the best "
        "counts. Products, GFLOP/s, the best of all runs:",
        "",
        "| | " + " | ".join(f"M = {n}" for n in counts) + " |",
        "|---" * (1 + len(counts)) + "|",
        *(
            f"| {kind}, {layout} | " + " | ".join(f"{by_rows[n] / 1e9:.0f}" for n in counts) + " |"
            for kind, layouts in rates.items()
            for layout, by_rows in layouts.items()
            if by_rows
        ),
    ]


def _notes(results: Results) -> Iterator[str]:
    """What the table leaves out, or what answers lack."""
    for run in results["runs"]:
        name = f"{run['peer']}, {run['shape']}, {run['precision']}, repeat {run['repeat'] + 1}"
        if "failed" in run:
            yield from ("", f"Did not start: {name}.")
        for cell, measured in run["cells"].items():
            if reason := fault(measured):
                yield from ("", f"Left out: {name}, {cell}: {reason}.")
            elif short := measured.get("short_requests"):
                yield from ("", f"Answers that ended early: {name}, {cell}: {short} of {measured['num_requests']}.")
