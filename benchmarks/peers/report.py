"""The table of a comparison: medians of the repeats, the better precision of each server, our ratio, the roofline."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.checkpoints import num_parameters
from launcher.bench.chart import Chart, svg

US = "tercet"

Results = dict[str, Any]


def best(results: Results, peer: str, shape: str, cell: str) -> tuple[float, str, dict[str, float]] | None:
    """Median output tokens/s, the precision that gave it, and the medians of the latencies in ms."""
    found = []
    for precision in sorted({r["precision"] for r in results["runs"]}):
        cells = [
            r["cells"][cell] for r in results["runs"]
            if (r["peer"], r["shape"], r["precision"]) == (peer, shape, precision) and cell in r["cells"]
        ]  # fmt: skip
        if cells and not all(c["errors"] for c in cells):
            rate = statistics.median(c["output_tokens_per_s"] for c in cells)
            latencies = {
                name: 1e3 * statistics.median(c[name] for c in cells) for name in ("ttft_p50", "ttft_p99", "tpot_p50")
            }
            found.append((rate, precision, latencies))
    return max(found, key=lambda entry: entry[0], default=None)


def roofline(results: Results, shape: str, cell: str, precision: str) -> float:
    """Output tokens/s if nothing but the matrix products were there: weights over bandwidth, or FLOPs over rate.

    A step reads all weights once, which is all the floor of a single row: what a library reaches there is the same
    bandwidth, used worse. Products of the rows between the measured counts run at the rate of the next lower one. The
    prompt is computed at the rate of 512 rows; the head only for its last token. Where the processor has no
    instructions for it, bfloat16 is multiplied as float32, so that the better rate of the two counts.
    """
    machine = results["machine"]
    prompt, rest = cell.split("->")
    output, rows = (int(part) for part in rest.split(" c="))
    total, head = num_parameters(shape)
    itemsize = 4 if precision == "float32" else 2
    kinds = ("float32",) if precision == "float32" else ("float32", "bfloat16")
    layouts = [by_rows for kind in kinds for by_rows in machine["flop_per_s"][kind].values()]
    rates = [{int(n): r for n, r in by_rows.items()} for by_rows in layouts if by_rows]

    def rate(n: int) -> float:
        return max(by_rows[max(m for m in by_rows if m <= n)] for by_rows in rates)

    step = total * itemsize / machine["read_bytes_per_s"]
    if rows > 1:
        step = max(step, 2 * total * rows / rate(rows))
    prefill = rows * 2 * ((total - head) * int(prompt) + head) / rate(512)
    return rows * output / (prefill + (output - 1) * step)


def _rows(results: Results) -> Iterator[tuple[str, str, list[tuple[str, tuple[float, str, dict[str, float]] | None]]]]:
    shapes = list(dict.fromkeys(r["shape"] for r in results["runs"]))
    peers = list(dict.fromkeys(r["peer"] for r in results["runs"]))
    cells = sorted({c for r in results["runs"] for c in r["cells"]}, key=_lengths)
    for shape in shapes:
        for cell in cells:
            yield shape, cell, [(peer, best(results, peer, shape, cell)) for peer in peers]


def _lengths(cell: str) -> tuple[int, ...]:
    """A cell's place in the table: prompt, output, clients."""
    return tuple(int(number) for number in re.findall(r"\d+", cell))


def lines(results: Results) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table."""
    peers = list(dict.fromkeys(r["peer"] for r in results["runs"]))
    others = [p for p in peers if p != US]
    head = ["shape", "cell", *peers, "tercet / best peer", "of roofline", "TTFT p50 ms: tercet", "best peer"]
    rows = []
    for shape, cell, entries in _rows(results):
        by_peer = dict(entries)
        ours = by_peer.get(US)
        rivals = {p: by_peer[p] for p in others}
        leader = max((e[0] for e in rivals.values() if e is not None), default=None)
        waits = [e[2]["ttft_p50"] for e in rivals.values() if e is not None]
        rows.append([
            shape, cell,
            *("–" if e is None else f"{e[0]:.1f}{'' if e[1] == 'bfloat16' else ' ' + e[1]}" for _, e in entries),
            "–" if ours is None or leader is None else f"{ours[0] / leader:.2f}",
            "–" if ours is None else f"{ours[0] / roofline(results, shape, cell, ours[1]):.0%}",
            "–" if ours is None else f"{ours[2]['ttft_p50']:.0f}",
            f"{min(waits):.0f}" if waits else "–",
        ])  # fmt: skip
    return head, rows


def show(results: Results) -> None:
    head, rows = lines(results)
    table = Table(title="output tokens/s, medians; bfloat16 unless said otherwise")
    for column in head:
        table.add_column(column, justify="left" if column in ("shape", "cell") else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=190).print(table)


def write(results: Results, out: Path) -> None:
    """The Markdown table and the chart beside the JSON file."""
    head, rows = lines(results)
    machine = results["machine"]
    versions = dict.fromkeys(f"{r['peer']} {r['version']}" for r in results["runs"])
    failed = dict.fromkeys(f"{r['peer']}, {r['shape']}, {r['precision']}" for r in results["runs"] if "failed" in r)
    repeats = 1 + max((r["repeat"] for r in results["runs"]), default=0)
    text = [
        f"Medians of up to {repeats} repeats on {machine['processor']}, {machine['cores']} cores, torch "
        f"{machine['torch']}: memory read {machine['read_bytes_per_s'] / 1e9:.1f} GB/s, copy "
        f"{machine['copy_bytes_per_s'] / 1e9:.1f} GB/s. Servers: {', '.join(versions)}.",
        "",
        "| products, GFLOP/s | " + " | ".join(f"M = {n}" for n in machine["flop_per_s"]["float32"]["plain"]) + " |",
        "|---" * (1 + len(machine["flop_per_s"]["float32"]["plain"])) + "|",
        *(
            f"| {kind}, {layout} | " + " | ".join(f"{rate / 1e9:.0f}" for rate in rates.values()) + " |"
            for kind, layouts in machine["flop_per_s"].items()
            for layout, rates in layouts.items()
            if rates
        ),
        "",
        "| " + " | ".join(head) + " |",
        "|---|---|" + "---:|" * (len(head) - 2),
        *("| " + " | ".join(row) + " |" for row in rows),
        *(["", "Did not start: " + "; ".join(failed) + "."] if failed else []),
        "",
        f"![output tokens/s]({out.stem}.svg)",
        "",
    ]
    out.with_suffix(".md").write_text("\n".join(text))
    charts = []
    for shape in dict.fromkeys(r["shape"] for r in results["runs"]):
        cells = [(cell, dict(entries)) for s, cell, entries in _rows(results) if s == shape]
        peers = list(cells[0][1]) if cells else []
        values = {peer: [None if (e := by[peer]) is None else e[0] for _, by in cells] for peer in peers}
        charts.append(Chart(f"{shape}: output tokens/s", [cell for cell, _ in cells], values))
    out.with_suffix(".svg").write_text(svg(charts))
