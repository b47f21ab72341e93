"""Times calls on a GPU, for measured choices."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_REPEATS = 9
# This many bytes are written between two runs, so that nothing is still in the cache: twice the largest GPU's.
_CACHE_BYTES = 256 << 20


class Stopwatch:
    """Median time of a call; `cold`: with caches filled by other data first, which takes memory."""

    def __init__(self, device: torch.device, *, cold: bool = True) -> None:
        self._device = device
        # In a step, too, a short kernel comes before: a kernel may begin, and read weights, while that one runs.
        self._short = torch.empty(1, dtype=torch.int8, device=device)
        self._cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device=device) if cold else None

    def __call__(self, run: Callable[[], object]) -> float:
        """Milliseconds. Compiles first."""
        run()
        events = [(_event(), _event()) for _ in range(_REPEATS)]
        for start, stop in events:
            # What comes first also keeps the device busy for longer than the launches take.
            if self._cache is None:
                run()
            else:
                self._cache.zero_()
            start.record()
            self._short.zero_()
            run()
            stop.record()
        torch.cuda.synchronize(self._device)
        return float(statistics.median(start.elapsed_time(stop) for start, stop in events))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
