"""Stages of a pipeline that take an exact time: what share of it they work while the router keeps them busy.

Each stage takes `STAGE_S` for a step; between two stages pass 2 % of that, and the sampled ids take 10 % on their way
back. With as many micro-batches as stages these times are lost in each round, with one more they are hidden.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.router.bench import MOST_STEP_TOKENS, Bench

NUM_STAGES = (2, 4, 8)
STAGE_S = 0.02
_HOP, _BACK = 0.02, 0.1  # of the time of a stage
_FEW_ROWS, _MANY_ROWS = 4, 64  # for each stage
_NUM_BLOCKS = 131_072
_ROW_TOKENS = 1000
Figures = dict[str, Any]


def measure(folder: Path, window_s: float) -> dict[str, Figures]:
    """With few rows for each stage there are as many micro-batches as stages, with many one more."""
    figures = {}
    for num_stages in NUM_STAGES:
        bench = Bench(
            folder, num_blocks=_NUM_BLOCKS, max_batch_size=4096, max_concurrent=4096, step_tokens=MOST_STEP_TOKENS,
            num_stages=num_stages,
        )  # fmt: skip
        try:
            bench.shard.ask("hops", hop_s=_HOP * STAGE_S, back_s=_BACK * STAGE_S)
            for rows, count in ((_FEW_ROWS, num_stages), (_MANY_ROWS, num_stages + 1)):
                figures[f"{num_stages} stages, {count} micro-batches"] = _cell(bench, rows * count, count, window_s)
        finally:
            bench.stop()
    return figures


def _cell(bench: Bench, rows: int, num_micro_batches: int, window_s: float) -> Figures:
    num_stages = num_micro_batches - 1 if rows >= _MANY_ROWS * num_micro_batches else num_micro_batches
    with bench.streaming(rows, _ROW_TOKENS, step_s=STAGE_S):
        time.sleep(4 * num_micro_batches * STAGE_S)
        window = bench.window(window_s, STAGE_S)
    cycle = max(num_micro_batches, num_stages + (num_stages - 1) * _HOP + _BACK)
    return {
        "rows": rows,
        "busy_share": window.busy_share,
        "possible_share": num_micro_batches / cycle,
        "starved_share": window.starved_share,
    }


def lines(cells: dict[str, Figures]) -> Iterator[tuple[str, str, str]]:
    """Rows of the report."""
    for name, cell in cells.items():
        figure = (
            f"each stage busy {cell['busy_share'] * 100:.1f} % of the time, "
            f"{cell['possible_share'] * 100:.0f} % possible; "
            f"{cell['rows']} rows, router waited for a core {cell['starved_share'] * 100:.0f} %"
        )
        yield name, figure, "95 %" if cell["possible_share"] == 1 else ""
