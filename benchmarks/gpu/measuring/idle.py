"""How much of the time a device does nothing, from what torch's profiler saw of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def device_spans(work: Callable[[], object]) -> list[tuple[float, float]]:
    """Start and end of everything that ran on the CUDA device during `work`, in microseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    spans = []
    for event in profile.events() or []:
        if event.device_type == DeviceType.CUDA:
            spans.append((float(event.time_range.start), float(event.time_range.end)))
    return spans
