"""Which figures are taken, in which order; one dictionary per block of the report."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.router import raw
from benchmarks.router.bench import LONG_PROMPT, LONGEST, SHORT_PROMPT, Bench, Window
from benchmarks.router.child import Child, free_port

ROWS = 64
ROW_TOKENS = 16_000  # of each of many streams: more than a run can deliver, and few enough for the blocks there are
STEP_1_ROW_S = 0.0037
STEP_64_ROWS_S = 0.005
PORTION_BYTES = 4096
FEW_BLOCKS, MANY_BLOCKS = 65_536, 1_000_000
ARRIVAL_RANKS = (1, 4)
FEW_TOKENS_STEP_S = 0.02
FEW_STEP_TOKENS = 256  # more than arrive during a step, and much less than the longest prompts
Figures = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long and how often."""

    window_s: float
    repeats: int
    num_requests: int
    queue_sizes: tuple[int, ...]
    arrival_steps_s: tuple[float, ...]
    arrival_rows: tuple[int, ...]


FULL = Effort(
    window_s=2.0, repeats=3, num_requests=1000, queue_sizes=(1_000, 10_000),
    arrival_steps_s=(0.005, 0.01, 0.02), arrival_rows=(64, 256),
)  # fmt: skip
SHORT = Effort(
    window_s=0.8, repeats=2, num_requests=300, queue_sizes=(1_000,), arrival_steps_s=(0.01,), arrival_rows=(64,)
)


def machine_limits(folder: Path, effort: Effort) -> Figures:
    """The floor: a bare gRPC call, a bare event through uvicorn on 1 and on 64 connections."""
    path = f"{folder}/raw"
    server = Child("benchmarks.router.raw", "grpc", path, log=folder / "raw-grpc.log")
    try:
        figures: Figures = {"grpc": raw.measure_grpc(path, effort.window_s)}
    finally:
        server.stop()
    figures["sse"] = {str(rows): _raw_sse(folder, rows, effort) for rows in (1, ROWS)}
    return figures


def _raw_sse(folder: Path, rows: int, effort: Effort) -> Figures:
    port = free_port()
    server = Child("benchmarks.router.raw", "sse", str(port), log=folder / "raw-sse.log")
    client = Child("benchmarks.router.client", str(port), log=folder / "raw-client.log")
    try:
        client.ask("open", number=rows)
        client.ask("send", body={"inputs": ""}, is_stream=True)
        time.sleep(0.5)
        before, cpu = client.ask("counts")["num_events"], server.cpu_s
        time.sleep(effort.window_s)
        number, cpu = client.ask("counts")["num_events"] - before, server.cpu_s - cpu
    finally:
        client.stop()
        server.stop()
    return {"cpu_us_per_event": cpu / number * 1e6, "events_per_s": number / effort.window_s}


def streams(bench: Bench, effort: Effort) -> Figures:
    """Hot and paced, one row and many."""
    figures = {
        "1 row, hot": _streamed(bench, effort, 1, LONGEST),
        "1 row, 3.7 ms steps": _streamed(bench, effort, 1, LONGEST, STEP_1_ROW_S),
    }
    return figures | streams_of_many(bench, effort)


def streams_of_many(bench: Bench, effort: Effort) -> Figures:
    """Many rows only: hot and paced, with a client that wakes for every event and with one that reads in portions."""
    return {
        "64 rows, hot": _streamed(bench, effort, ROWS, ROW_TOKENS),
        "64 rows, 5 ms steps": _streamed(bench, effort, ROWS, ROW_TOKENS, STEP_64_ROWS_S),
        "64 rows, hot, portions": _streamed(bench, effort, ROWS, ROW_TOKENS, low_water=PORTION_BYTES),
        "64 rows, 5 ms steps, portions": _streamed(
            bench, effort, ROWS, ROW_TOKENS, STEP_64_ROWS_S, low_water=PORTION_BYTES
        ),
    }


def latencies(bench: Bench, effort: Effort) -> Figures:
    seconds = effort.window_s
    return {"hot": bench.latency(seconds), "3.7 ms steps": bench.latency(2 * seconds, STEP_1_ROW_S)}


def requests(bench: Bench, effort: Effort) -> Figures:
    """What a request costs up to the queue, and from there to its answer."""
    number = effort.num_requests
    figures: Figures = {}
    for name, prompt in (("54 characters", SHORT_PROMPT), ("540 characters", LONG_PROMPT)):
        repeats = [bench.validated(number, prompt) for _ in range(effort.repeats)]
        figures[name] = {key: min(r[key] for r in repeats) for key in repeats[0] if key.endswith("_us")}
        figures[name]["drain_per_s"] = max(r["drain_per_s"] for r in repeats)
    figures["one token, 8 clients"] = bench.closed_loop(8, number, 1, is_stream=False)
    figures["16 tokens streamed, 64 clients"] = bench.closed_loop(ROWS, number, 16, is_stream=True)
    return figures


def behind_a_queue(bench: Bench, effort: Effort, *, rows: int) -> Figures:
    """The streams again, with requests waiting that cannot be taken in."""
    figures: Figures = {}
    tokens, step_s = (LONGEST, STEP_1_ROW_S) if rows == 1 else (ROW_TOKENS, STEP_64_ROWS_S)
    for number in effort.queue_sizes:
        with bench.streaming(rows, tokens), bench.waiting(number, rows) as cell:
            cell["hot"] = _best(bench, effort, 0.0)
            cell["hot_lag"] = bench.lag(effort.window_s)
            bench.shard.ask("pace", step_s=step_s)
            time.sleep(0.3)
            cell["paced"] = _best(bench, effort, step_s)
            cell["paced_lag"] = bench.lag(effort.window_s)
            cell["storm"] = bench.storm()
        figures[str(number)] = cell
    return figures


def _streamed(
    bench: Bench, effort: Effort, rows: int, tokens: int, step_s: float = 0.0, *, low_water: int = 1
) -> Figures:
    with bench.streaming(rows, tokens, step_s=step_s, low_water=low_water):
        return _best(bench, effort, step_s)


def _best(bench: Bench, effort: Effort, step_s: float) -> Figures:
    """CPU: the least disturbed window; rates: the median window."""
    windows = [bench.window(effort.window_s, step_s) for _ in range(effort.repeats)]
    return {
        "steps_per_s": _median(windows, "steps_per_s"),
        "tokens_per_s": _median(windows, "tokens_per_s"),
        "cpu_us_per_token": min(w.cpu_us_per_token for w in windows),
        "cpu_us_per_token_median": _median(windows, "cpu_us_per_token"),
        "client_cpu_us_per_token": min(w.client_cpu_us_per_token for w in windows),
        "busy_share": _median(windows, "busy_share"),
        "starved_share": _median(windows, "starved_share"),
        "windows": [[w.steps_per_s, w.cpu_us_per_token, w.busy_share] for w in windows],
    }


def _median(windows: list[Window], name: str) -> float:
    values: list[float] = [getattr(window, name) for window in windows]
    return statistics.median(values)
