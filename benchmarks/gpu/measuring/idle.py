"""What a device does: how much of the time nothing, and which kernels, from what torch's profiler saw of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType


def busy_share(spans: Iterable[tuple[float, float]]) -> float:
    """The share of the time between the first start and the last end that is covered by [start, end) spans."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0
    first, covered = ordered[0][0], 0.0
    reach = first
    for start, end in ordered:
        if end > reach:
            covered += end - max(start, reach)
            reach = end
    return covered / (reach - first) if reach > first else 0.0


@dataclass(frozen=True, slots=True)
class Ran:
    """Something that ran on the device, in microseconds."""

    name: str
    start: float
    end: float


def device_work(work: Callable[[], object]) -> list[Ran]:
    """Everything that ran on the CUDA device during `work`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return [
        Ran(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in profile.events() or []
        if event.device_type == DeviceType.CUDA
    ]


def device_spans(work: Callable[[], object]) -> list[tuple[float, float]]:
    """The same without names."""
    return [(one.start, one.end) for one in device_work(work)]


def by_time(ran: Iterable[Ran], calls: int) -> str:
    """Kernels with how often they ran in one of `calls` and the microseconds they took, the longest first."""
    total: dict[str, float] = {}
    count: dict[str, int] = {}
    for one in ran:
        total[one.name] = total.get(one.name, 0.0) + one.end - one.start
        count[one.name] = count.get(one.name, 0) + 1
    ordered = sorted(total, key=total.__getitem__, reverse=True)
    rows = [f"{total[name] / calls:.1f} us, {count[name] / calls:g}x {_short(name)}" for name in ordered]
    return "; ".join([f"{sum(total.values()) / calls:.1f} us in {sum(count.values()) / calls:g} kernels", *rows])


def _short(name: str) -> str:
    """Without the arguments of templates and functions, which fill pages."""
    return name.removeprefix("void ").split("<")[0].split("(")[0][:60] or name[:60]
