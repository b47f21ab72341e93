"""S5: the launcher, its shard and its router under load, beside the same load in this process."""

from __future__ import annotations

import gc
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring import roofline
from benchmarks.gpu.measuring.targets import time_to_first_token
from benchmarks.gpu.subjects.drive import Driver
from benchmarks.gpu.subjects.models import Subject, of_folder, of_shape
from benchmarks.gpu.subjects.serving import model_folder, prompts, running
from benchmarks.gpu.subjects.shapes import Shape, by_size
from benchmarks.server import Server, closed_cell
from launcher.bench.results import Cell, median_cell

LEVELS = (1, 64, 256, 32, 128)
PROMPT, OUTPUT = 128, 128
FIRST_PROMPT = 1024


@dataclass(frozen=True, slots=True)
class Load:
    """One size of everything: concurrency levels, tokens of prompts and answers, and of the prompt whose first token is
    waited for."""

    levels: tuple[int, ...]
    prompt: int
    output: int
    first: int


def run(context: Context) -> None:
    """The large shape at all levels, the small one alone; or the user's model."""
    full = Load(LEVELS, PROMPT, OUTPUT, FIRST_PROMPT)
    load = Load((1, 3), 12, 6, 40) if context.tiny else full
    if context.model is not None:
        _measure(context, of_folder(context, context.model), None, load)
        return
    small, large, _ = by_size(context.tiny)
    _measure(context, of_shape(context, large, "8B"), large, load)
    if context.has_time(45):
        _measure(context, of_shape(context, small, "1B"), small, Load((1,), load.prompt, load.output, load.first))
    else:
        context.skip("served 1B", "no time left")


def _measure(context: Context, subject: Subject, shape: Shape | None, load: Load) -> None:
    """In this process first; then its memory is the server's."""
    length = load.prompt + load.output + 64
    driver = subject.driver(context, max(load.levels) * length, (1, *load.levels), length)
    alone = {level: _in_process(driver, load, level) for level in (1, *_compared(load))}
    del driver
    gc.collect()
    if context.on_cuda:
        torch.cuda.empty_cache()
    measure_server(context, subject, shape, load, alone)


def measure_server(
    context: Context,
    subject: Subject,
    shape: Shape | None,
    load: Load,
    alone: Mapping[int, tuple[float, float]],
) -> None:
    """Start, first token and load of a server. alone: by level, what `_in_process` found; others are not compared."""
    name = subject.bar or subject.name
    with model_folder(context, shape) as folder, running(context, folder) as server:
        context.figure(f"served {name}: start to an open port", server.start_s, "s", target="start")
        _warm(server, shape, load)
        _first_token(context, subject, server, shape, load)
        for level in load.levels:
            if not context.has_time(10):
                context.skip(f"served {name} at {level}", "no time left")
                continue
            _level(context, subject, server, shape, load, level, alone.get(level))


def _compared(load: Load) -> tuple[int, ...]:
    """Levels whose throughput in this process is measured too."""
    return tuple(level for level in load.levels if level >= 64) or load.levels[1:]


def _in_process(driver: Driver, load: Load, level: int) -> tuple[float, float]:
    """The same requests without server: output tokens/s of two waves, and seconds between tokens of a wave."""
    started = time.perf_counter()
    step = 0.0
    for _ in range(2):
        driver.engine.clear(None)
        driver.blocks.reset()
        driver.prefill([driver.request(driver.random_prompt(load.prompt), load.output) for _ in range(level)])
        # One token comes from the prefill; `pace` runs one step more than it is told.
        step = driver.pace(0, load.output - 2).median
    elapsed = time.perf_counter() - started
    return 2 * level * load.output / elapsed, step


def _warm(server: Server, shape: Shape | None, load: Load) -> None:
    """Kernels are compiled and lazy parts of the client's path have run before anything is timed."""
    for count in (1, max(load.levels)):
        closed_cell(server.url, prompts(count, load.prompt, shape, seed=97 + count), count, 4)


def _first_token(context: Context, subject: Subject, server: Server, shape: Shape | None, load: Load) -> None:
    """Of an idle server, prompts that the prefix cache does not know."""
    cells = [
        closed_cell(server.url, prompts(1, load.first, shape, seed=200 + i), 1, 2)
        for i in range(2 if context.tiny else 9)
    ]
    seconds = median_cell(cells).ttft_p50
    least = roofline.prefill_seconds(subject.cost, context.ceilings, [load.first])
    context.figure(
        f"served {subject.bar or subject.name}: TTFT, idle, {load.first} tokens",
        seconds,
        "s",
        ratio=least / seconds,
        predicted=1.2 * least / 0.7 + 0.005,
        target=time_to_first_token(least) if subject.bar == "8B" else None,
    )


def _level(
    context: Context,
    subject: Subject,
    server: Server,
    shape: Shape | None,
    load: Load,
    level: int,
    alone: tuple[float, float] | None,
) -> None:
    name = f"served {subject.bar or subject.name} at {level}"
    work = prompts(max(2, 2 * level), load.prompt, shape, seed=1000 + level)
    with _utilisation(context) as busy:
        cell = closed_cell(server.url, work, level, load.output)
    context.check(f"{name}: every request answered", cell.errors == 0, cell.first_error or "")
    machine, cost = context.ceilings, subject.cost
    least = roofline.step_seconds(cost, machine, level, load.prompt + load.output / 2)
    context.figure(
        name, cell.output_tokens_per_s, "tok/s", ratio=cell.output_tokens_per_s / (level / least),
        detail=f"ITL p50/p99 {cell.itl_p50 * 1e3:.2f}/{cell.itl_p99 * 1e3:.2f} ms, "
        f"TTFT {cell.ttft_p50 * 1e3:.0f}/{cell.ttft_p99 * 1e3:.0f} ms",
    )  # fmt: skip
    if busy:
        context.figure(f"{name}: GPU idle", 1 - statistics.fmean(busy) / 100, "share", detail="nvidia-smi samples")
    if alone is not None:
        _compare(context, subject, name, cell, level, alone)


def _compare(context: Context, subject: Subject, name: str, cell: Cell, level: int, alone: tuple[float, float]) -> None:
    rate, step = alone
    bar = subject.bar
    if level == 1:
        added = cell.itl_p50 / step - 1
        detail = f"{cell.itl_p50 * 1e3:.3f} ms, in-process {step * 1e3:.3f} ms"
        title = f"{name}: added latency"
        context.figure(title, added, "share", target=f"added latency {bar}", predicted=0.03, detail=detail)
        return
    context.figure(
        f"{name}: served/in-process", cell.output_tokens_per_s / rate, "share", target=f"served/in-process {bar}",
        predicted=0.97, detail=f"in-process {rate:,.0f} tok/s",
    )  # fmt: skip


@contextmanager
def _utilisation(context: Context) -> Iterator[list[float]]:
    """Percent of the time with a kernel running, sampled while inside; stays empty where there is no nvidia-smi."""
    samples: list[float] = []
    if not context.on_cuda:
        yield samples
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--id=0", "-lms", "200"]
    try:
        sampler = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield samples
        return
    try:
        yield samples
    finally:
        sampler.terminate()
        said, _ = sampler.communicate(timeout=10)
        # The first and the last samples also cover the time before and after.
        lines = [line for line in said.splitlines() if line.strip().isdigit()]
        samples += [float(line) for line in lines[1:-1]]
