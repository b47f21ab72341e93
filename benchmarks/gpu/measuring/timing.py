"""How long work on a device takes: medians of many, twice, and how far the two lie apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """seconds: the median of all; spread: how far the medians of the two halves lie apart, relative to it."""

    seconds: float
    spread: float
    count: int


def of_samples(first: list[float], second: list[float]) -> Timing:
    """Two runs of samples in seconds."""
    middle = statistics.median(first + second)
    apart = abs(statistics.median(first) - statistics.median(second))
    return Timing(middle, apart / middle if middle else 0.0, len(first) + len(second))


def measure(work: Work, device: torch.device, *, repeats: int = 50, warm_up: int = 3) -> Timing:
    """Time on the device of one call of `work`, host time included where the device waits for it. Two runs."""
    for _ in range(warm_up):
        work()
    first, second = (_samples(work, device, max(1, repeats // 2)) for _ in range(2))
    return of_samples(first, second)


def _samples(work: Work, device: torch.device, count: int) -> list[float]:
    if device.type != "cuda":
        return [_wall(work) for _ in range(count)]
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda.synchronize(device)
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in marks]


def _wall(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def captured(work: Work, device: torch.device, calls: int = 1) -> Work:
    """`work`, `calls` times, as one CUDA graph: no host time. Plain calls on a CPU.

    What it allocates lives in the graph's pool. Raises RuntimeError if the work cannot be captured.
    """

    def repeated() -> None:
        for _ in range(calls):
            work()

    if device.type != "cuda":
        return repeated
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):  # lazy initialisation and compilation do not belong into the graph
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated()
    return graph.replay


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
