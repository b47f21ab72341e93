"""Ranks behind the endpoints of their nodes: what a call costs the router.

An endpoint passes a call on to all ranks of its node, so a call should cost the router as much for each endpoint as for
each rank that it calls itself, and next to nothing for the ranks behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.router.bench import LONGEST, Bench

# Ranks, and the endpoints before them; 0: the router calls each rank.
CASES = ((8, 0), (8, 8), (64, 8), (64, 0))
_NUM_BLOCKS = 65_536
Figures = dict[str, Any]


def measure(folder: Path, window_s: float, repeats: int) -> dict[str, Figures]:
    """One stream, whose steps cost nothing; the least disturbed of some windows."""
    figures = {}
    for num_ranks, num_endpoints in CASES:
        bench = Bench(
            folder, num_blocks=_NUM_BLOCKS, max_batch_size=1, max_concurrent=64, num_ranks=num_ranks,
            num_endpoints=num_endpoints,
        )  # fmt: skip
        try:
            with bench.streaming(1, LONGEST):
                windows = [bench.window(window_s) for _ in range(repeats)]
        finally:
            bench.stop()
        figures[_name(num_ranks, num_endpoints)] = {
            "ranks": num_ranks,
            "endpoints": num_endpoints,
            "cpu_us_per_call": min(one.cpu_us_per_token for one in windows),  # one row: each call brings one token
            "starved_share": min(one.starved_share for one in windows),
        }
    return figures


def _name(num_ranks: int, num_endpoints: int) -> str:
    return f"{num_ranks} ranks, " + (f"{num_endpoints} endpoints" if num_endpoints else "each called by the router")


def lines(cells: dict[str, Figures]) -> Iterator[tuple[str, str, str]]:
    """Rows of the report."""
    for name, cell in cells.items():
        called = cell["endpoints"] or cell["ranks"]
        figure = f"{cell['cpu_us_per_call']:,.0f} us, {cell['cpu_us_per_call'] / called:.0f} us for each called"
        yield f"CPU per call, {name}", figure, ""
