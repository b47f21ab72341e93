"""Requests that keep arriving: whether the device waits for the router while it has work.

Every step takes the same time, with prompts or without. So what the device does not do in its time is the router's
and the protocol's doing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.router.bench import Bench, quantile
from benchmarks.router.client import ANSWERS

LOAD = 0.8  # of the rows that the device can compute
_SEED = 7
Figures = dict[str, Any]


def measure_all(bench: Bench, steps_s: tuple[float, ...], rows: int, window_s: float) -> dict[str, Figures]:
    return {name_of(rows, step_s): measure(bench, rows, step_s, window_s) for step_s in steps_s}


def name_of(rows: int, step_s: float) -> str:
    return f"{rows} rows, {step_s * 1e3:g} ms steps"


def on_ranks(name: str, num_ranks: int) -> str:
    return name if num_ranks == 1 else f"{name}, {num_ranks} ranks"


def measure(bench: Bench, rows: int, step_s: float, window_s: float) -> Figures:
    """Starts when the first long answers have ended, so that requests leave as fast as they arrive."""
    client, shard = bench.client, bench.shard
    client.ask("forget")
    shard.ask("pace", step_s=step_s)
    rate = LOAD * rows / (ANSWERS.mean * step_s)
    client.ask("arrive", rate=rate, seed=_SEED)
    time.sleep(ANSWERS.most * step_s)
    client.ask("note_gaps")
    running = []
    starved_s = bench.starved_s()
    shard.ask("reset")
    ends_at = time.monotonic() + window_s
    while time.monotonic() < ends_at:
        time.sleep(min(0.5, window_s))
        running.append(bench.gauge("tgi_batch_current_size"))
    statistic = shard.ask("statistics")
    starved_s = bench.starved_s() - starved_s
    gaps_s = client.ask("noted_gaps")
    counts = client.ask("counts")
    client.ask("end_arrivals")
    shard.ask("pace", step_s=0.0)
    bench.router_idle()
    if counts["num_refused"]:
        raise RuntimeError(f"{counts['num_refused']} requests were refused")
    busy_s = statistic["num_steps"] * step_s
    return {
        "rows": rows,
        "step_s": step_s,
        "requests_per_s": rate,
        "running": statistics.mean(running),
        "busy_share": busy_s / (busy_s + statistic["idle_s"]),
        "between_tokens_p50_s": quantile(gaps_s, 0.5),
        "between_tokens_p99_s": quantile(gaps_s, 0.99),
        "starved_share": starved_s / window_s,
    }


def lines(cells: dict[str, Figures]) -> Iterator[tuple[str, str, str]]:
    """Rows of the report."""
    for name, cell in cells.items():
        between = cell["between_tokens_p99_s"] / cell["step_s"]
        figure = (
            f"device busy {cell['busy_share'] * 100:.1f} % of the time with work, "
            f"between tokens p99 {between:.1f} steps; "
            f"{cell['running']:.0f} rows, router waited for a core {cell['starved_share'] * 100:.0f} %"
        )
        yield f"arrivals, {name}", figure, "95 %, 3 steps"
