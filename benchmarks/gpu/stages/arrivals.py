"""S11: the server while requests keep arriving: idle share of the device by its kernels, and time between tokens.

Unlike S5's waves, prompts join running rows all the time. One server for each bound on the prompt tokens of a step.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring import predictions, roofline
from benchmarks.gpu.measuring.idle import busy_share
from benchmarks.gpu.subjects.arrivals import Arrival, Spread, draw, send
from benchmarks.gpu.subjects.models import Subject, of_folder, of_shape
from benchmarks.gpu.subjects.serving import model_folder, prompts, running, text
from benchmarks.gpu.subjects.shapes import Shape, by_size
from benchmarks.server import closed_cell
from launcher.bench.results import Cell

# Share of what the device could serve by the prediction that is asked for.
LOAD = 0.8
PROMPTS, OUTPUTS = Spread(32, 2048), Spread(16, 512)
TINY_PROMPTS, TINY_OUTPUTS = Spread(4, 30), Spread(2, 6)
ROWS = 64
SECONDS = 30.0
WARM_UP_S = 5.0
# `--max-step-prefill-tokens`; None: the default.
BUDGETS = (2048, 8192, None)
PROFILED_STEPS = 400
# What the trace calls work of the device.
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def run(context: Context) -> None:
    """The large shape, or the user's model."""
    shape = None if context.model is not None else by_size(context.tiny)[1]
    subject = of_folder(context, context.model) if context.model is not None else of_shape(context, shape, "8B")
    with model_folder(context, shape) as folder:
        for budget in (256,) if context.tiny else BUDGETS:
            name = f"arrivals {subject.bar or subject.name}, {budget or 'unset'} prompt tokens a step"
            if context.has_time((1 if budget else 2) * SECONDS + 50):
                _measure(context, subject, shape, folder, name, budget)
            else:
                context.skip(name, "no time left")


def _measure(
    context: Context, subject: Subject, shape: Shape | None, folder: Path, name: str, budget: int | None
) -> None:
    """Without the profiler first: it holds up steps, most of all when it writes."""
    step, rate = expected(context, subject)
    arguments = () if budget is None else ("--max-step-prefill-tokens", str(budget))

    def sent(seconds: float, seed: int, *more: str) -> tuple[Cell, int]:
        arrivals = requests(context, shape, rate, seconds, seed)
        with running(context, folder, *arguments, *more) as server:
            # Fewer steps than the profiler leaves out.
            closed_cell(server.url, prompts(2, 4, shape, seed=5), 1, 2)
            # The libraries load a kernel when it is first used: the first seconds have steps that no later ones have.
            send(server.url, requests(context, shape, rate, WARM_UP_S, 6))
            return send(server.url, arrivals), len(arrivals)

    cell, count = sent(SECONDS, 7)
    context.check(f"{name}: every request answered", cell.errors == 0, cell.first_error or "")
    context.figure(
        name, cell.output_tokens_per_s, "tok/s",
        detail=f"{count} requests, {rate:.2f}/s; TTFT p50/p99 {cell.ttft_p50 * 1e3:.0f}/{cell.ttft_p99 * 1e3:.0f} ms",
    )  # fmt: skip
    context.figure(
        f"{name}: ITL p99", cell.itl_p99, "s", detail=f"p50 {cell.itl_p50 * 1e3:.2f} ms; pure step {step * 1e3:.2f} ms"
    )
    context.figure(f"{name}: ITL p99 over a pure step", cell.itl_p99 / step, "times", detail="to be at most 3")
    if budget is not None and not context.tiny:  # one trace is enough
        return
    with tempfile.TemporaryDirectory(prefix="trace-") as place:
        steps = str(10 if context.tiny else PROFILED_STEPS)
        sent(SECONDS / 2, 8, "--profile", place, "--profile-steps", steps)
        spans = device_work(_trace(Path(place) / "rank-0.json"))
    if spans:
        context.figure(f"{name}: device idle", 1 - busy_share(spans), "share", detail=f"{len(spans)} kernels traced")
    else:
        context.skip(f"{name}: device idle", "the trace has no kernels")


def requests(context: Context, shape: Shape | None, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """What arrives in so many seconds."""
    if context.tiny:
        return draw(6, 50.0, TINY_PROMPTS, TINY_OUTPUTS, partial(text, shape=shape), seed)
    count = max(64, round(rate * seconds))
    return draw(count, rate, PROMPTS, OUTPUTS, partial(text, shape=shape), seed)


def expected(context: Context, subject: Subject) -> tuple[float, float]:
    """Predicted seconds of a decode step with ROWS rows, and the requests a second that are LOAD of what can be served:
    one takes its prompt, and its share of a step for each token."""
    asked, answered = (TINY_PROMPTS, TINY_OUTPUTS) if context.tiny else (PROMPTS, OUTPUTS)
    length = int(asked.mean + answered.mean / 2)
    step = predictions.decode_seconds(subject.cost, context.ceilings, ROWS, length)
    prompt = roofline.prefill_seconds(subject.cost, context.ceilings, [round(asked.mean)]) / 0.7
    return step, LOAD / (prompt + answered.mean * step / ROWS)


def _trace(file: Path, limit_s: float = 10.0) -> dict[str, list[dict[str, object]]]:
    """Written by the shard some time after its last step; empty if it never comes."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        try:
            found: dict[str, list[dict[str, object]]] = json.loads(file.read_text())
            return found
        except (OSError, ValueError):  # not there, or not whole yet
            time.sleep(0.2)
    return {}


def device_work(trace: dict[str, list[dict[str, object]]]) -> list[tuple[float, float]]:
    """Start and end of everything that the device did, in microseconds, from a Chrome trace."""
    events = [event for event in trace.get("traceEvents", []) if event.get("cat") in DEVICE_WORK]
    return [(float(str(e["ts"])), float(str(e["ts"])) + float(str(e.get("dur", 0)))) for e in events]
