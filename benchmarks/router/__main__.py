"""`python -m benchmarks.router [--short] [--only PART]`: what the router itself costs; see the package."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.router import arrivals, endpoints, plan, stages
from benchmarks.router.bench import MOST_STEP_TOKENS, Bench
from benchmarks.router.report import markdown

OUT = Path(__file__).parent.parent / "results" / "router.json"
_MAX_CONCURRENT = 16_384
PARTS: dict[str, Callable[[Path, plan.Effort], dict[str, Any]]] = {
    "stages": lambda folder, effort: stages.measure(folder, effort.window_s),
    "endpoints": lambda folder, effort: endpoints.measure(folder, effort.window_s, effort.repeats),
}
"""Parts of the report that can be taken by themselves."""


def measure(folder: Path, effort: plan.Effort) -> dict[str, Any]:
    """All figures; three routers are started one after another."""

    def on(
        num_blocks: int,
        max_batch_size: int,
        work: Callable[[Bench], dict[str, Any]],
        *,
        step_tokens: int | None = None,
        num_ranks: int = 1,
    ) -> dict[str, Any]:
        bench = Bench(
            folder, num_blocks=num_blocks, max_batch_size=max_batch_size, max_concurrent=_MAX_CONCURRENT,
            step_tokens=step_tokens, num_ranks=num_ranks,
        )  # fmt: skip
        try:
            return work(bench)
        finally:
            bench.stop()

    report: dict[str, Any] = {"limits": plan.machine_limits(folder, effort), "queue": {}}
    report |= on(
        plan.FEW_BLOCKS,
        plan.ROWS,
        lambda bench: {
            "streams": plan.streams(bench, effort),
            "latency": plan.latencies(bench, effort),
            "requests": plan.requests(bench, effort),
        },
    )
    report["queue"]["1"] = on(plan.FEW_BLOCKS, 1, lambda bench: plan.behind_a_queue(bench, effort, rows=1))
    report["queue"]["64"] = on(
        plan.FEW_BLOCKS, plan.ROWS, lambda bench: plan.behind_a_queue(bench, effort, rows=plan.ROWS)
    )
    report["many_blocks"] = on(
        plan.MANY_BLOCKS,
        plan.ROWS,
        lambda bench: {
            "streams": plan.streams_of_many(bench, effort),
            "churn": bench.closed_loop(plan.ROWS, effort.num_requests, 16, is_stream=True),
        },
    )
    return report | {"arrivals": measure_arrivals(on, effort)} | {name: PARTS[name](folder, effort) for name in PARTS}


def measure_arrivals(on: Callable[..., dict[str, Any]], effort: plan.Effort) -> dict[str, Any]:
    """On a router for each number of rows and ranks, and on one whose steps compute parts of long prompts."""
    window_s = 3 * effort.window_s
    figures: dict[str, Any] = {}
    for rows, num_ranks in itertools.product(effort.arrival_rows, plan.ARRIVAL_RANKS):
        cells = on(
            plan.FEW_BLOCKS,
            rows,
            lambda bench, rows=rows: arrivals.measure_all(bench, effort.arrival_steps_s, rows, window_s),
            step_tokens=MOST_STEP_TOKENS,
            num_ranks=num_ranks,
        )
        figures |= {arrivals.on_ranks(name, num_ranks): cell for name, cell in cells.items()}
    rows, step_s = plan.ROWS, plan.FEW_TOKENS_STEP_S
    name = f"{arrivals.name_of(rows, step_s)} of {plan.FEW_STEP_TOKENS} tokens"
    figures[name] = on(
        plan.FEW_BLOCKS,
        rows,
        lambda bench: arrivals.measure(bench, rows, step_s, window_s),
        step_tokens=plan.FEW_STEP_TOKENS,
    )
    return figures


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("grpcio", "uvicorn", "uvloop", "httptools", "protobuf")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="under a minute, fewer repeats, 1,000 queued only")
    parser.add_argument("--only", choices=PARTS, help="take this part alone, and keep the rest of --out")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    effort = plan.SHORT if options.short else plan.FULL
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tercet-bench-") as folder:
        if options.only is not None:
            report = json.loads(options.out.read_text()) | {options.only: PARTS[options.only](Path(folder), effort)}
        else:
            report = measure(Path(folder), effort) | {"machine": machine()}
            report["effort"] = asdict(effort) | {"seconds": time.monotonic() - started}
    print(markdown(report))
    print(f"\n{time.monotonic() - started:.0f} s; written to {options.out}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
