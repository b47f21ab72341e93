"""Products of few rows on a GPU: for every shape, the quicker of the library's and our own, measured once at load.

What is quicker depends on the shape, on the card and on the library's version, so nothing is assumed. Once measured, a
choice stands as long as the process does: equal inputs give equal bits. Only 16-bit types are considered; in float32,
where a row must not depend on the rows beside it, the library multiplies as ever.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.kernels.availability import usable

logger = logging.getLogger(__name__)

# Numbers of rows that share a choice: each up to its own, from the one before.
BUCKETS = (1, 8, 16, 32)
_REPEATS = 9
# Between two runs as much is written, so that no weight is still in the cache: twice the largest card's.
_CACHE_BYTES = 256 << 20
# Ours must be this much quicker: less is within the noise of a measurement.
_GAIN = 0.97
# Matrices below this size take no time worth the measurement.
_SMALLEST = 1 << 20


class SmallProduct:
    """One shape's way to multiply, for each bucket of rows. Shared by all matrices of that shape."""

    __slots__ = ("_num_processors", "_ways", "dtype", "shape")

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, num_processors: int) -> None:
        self.shape = shape  # out, in
        self.dtype = dtype
        self._num_processors = num_processors
        # Of each bucket: a kernels.matmul.Form, or None for the library.
        self._ways: list[Any] = [None] * len(BUCKETS)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] @ weight.T + bias."""
        num_rows = x.shape[0]
        if not 1 <= num_rows <= BUCKETS[-1]:
            return F.linear(x, weight, bias)
        return self._run(self._ways[_bucket(num_rows)], x, weight, bias)

    def candidates(self, bucket: int) -> list[Any]:
        """What can be chosen for a bucket, the library first."""
        from model_server.kernels.matmul import forms

        return [None, *forms(BUCKETS[bucket])]

    def choose(self, bucket: int, number: int) -> None:
        """Take candidate `number` from now on."""
        self._ways[bucket] = self.candidates(bucket)[number]
        logger.debug(
            "Products of up to %d rows with %s %s: %s", BUCKETS[bucket], self.shape, self.dtype, self._ways[bucket]
        )

    def quickest(self, bucket: int, time_ms: Callable[[Callable[[], object]], float], device: torch.device) -> int:
        """The number of the candidate that takes the least time on random numbers; the library unless one is better."""
        out, depth = self.shape
        weight = torch.randn(out, depth, dtype=self.dtype, device=device)
        x = torch.randn(BUCKETS[bucket], depth, dtype=self.dtype, device=device)
        times = [time_ms(lambda way=way: self._run(way, x, weight, None)) for way in self.candidates(bucket)]  # type: ignore[misc]
        times[0] *= _GAIN
        return min(range(len(times)), key=times.__getitem__)

    def _run(self, way: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if way is None:
            return F.linear(x, weight, bias)
        from model_server.kernels.matmul import multiply

        return multiply(x, weight, bias, way, self._num_processors)


# All shapes that matrices of this process have, in the order of loading, which is the same on every rank.
_known: dict[tuple[torch.device, torch.dtype, tuple[int, int]], SmallProduct] = {}


def small_product(weight: Tensor) -> SmallProduct | None:
    """How products with `weight` [out, in] are taken once `measure` has been called; None: by the library alone."""
    if weight.device.type != "cuda" or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    if weight.numel() < _SMALLEST or not weight.is_contiguous() or not usable(weight.device):
        return None
    shape = (weight.shape[0], weight.shape[1])
    key = (weight.device, weight.dtype, shape)
    if key not in _known:
        processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        _known[key] = SmallProduct(shape, weight.dtype, processors)
    return _known[key]


def measure(device: torch.device, group: ProcessGroup) -> None:
    """Time all shapes of 16-bit matrices loaded so far on `device`, and choose. Waits for the device.

    All ranks must call it at the same point: they choose alike, so that what they compute alike stays alike. Where the
    ranks' numbers of shapes differ (a vocabulary that does not divide evenly), or memory is short, the library is kept.
    """
    found = [product for (on, _, _), product in _known.items() if on == device]
    if group.size > 1 and not _same_everywhere(len(found), group):
        return
    if not found:
        return
    numbers = _measured(found, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the copies of weights that were multiplied
    for place, number in enumerate(numbers):
        agreed = group.all_reduce_min(number)
        found[place // len(BUCKETS)].choose(place % len(BUCKETS), agreed)


def _measured(found: list[SmallProduct], device: torch.device) -> list[int]:
    """The quickest of every shape and bucket; the library's for all once memory has run out."""
    numbers = [0] * (len(found) * len(BUCKETS))
    try:
        stopwatch = _Stopwatch(device)
        for place in range(len(numbers)):
            numbers[place] = found[place // len(BUCKETS)].quickest(place % len(BUCKETS), stopwatch, device)
    except torch.OutOfMemoryError:
        logger.warning("Too little memory to measure small products: the library multiplies")
        return [0] * len(numbers)
    return numbers


def _same_everywhere(number: int, group: ProcessGroup) -> bool:
    return group.all_reduce_min(number) == -group.all_reduce_min(-number)


def _bucket(num_rows: int) -> int:
    return next(place for place, most in enumerate(BUCKETS) if num_rows <= most)


class _Stopwatch:
    """Median time of a call on the device, with cold caches."""

    def __init__(self, device: torch.device) -> None:
        self._cache = torch.empty(_CACHE_BYTES, dtype=torch.int8, device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        """Milliseconds. Compiles first."""
        run()
        events = [(_event(), _event()) for _ in range(_REPEATS)]
        for start, stop in events:
            self._cache.zero_()  # keeps the device busy for longer than the launches take, too
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize(self._cache.device)
        return float(statistics.median(start.elapsed_time(stop) for start, stop in events))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
