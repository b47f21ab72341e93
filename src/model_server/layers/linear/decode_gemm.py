"""Decode GEMMs (few rows) on a GPU: for every shape the fastest product, measured at load.

A choice stands for the life of the process: equal inputs give equal bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.layers.linear.linear import torch_product
from model_server.stopwatch import Stopwatch

logger = logging.getLogger(__name__)


class Product(Protocol):
    """One way to multiply."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply x [n, in] by weight [out, in], plus bias [out], in float32 or x's type; into `out` if given."""


# Numbers of rows that share a choice: each up to its own, from the one before.
BUCKETS = (1, 8, 16, 32)
# Ours must be this much faster: less is within the noise of a measurement.
_GAIN = 0.97


class DecodeGemm:
    """The fastest GEMM of one shape for each bucket of rows."""

    __slots__ = ("_by_rows", "candidates", "dtype", "shape")

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, candidates: Sequence[Sequence[Product]]) -> None:
        self.shape = shape  # out, in
        self.dtype = dtype
        # Our products for each bucket; the library's comes first, and serves until `choose`.
        self.candidates = tuple((torch_product, *own) for own in candidates)
        self._by_rows: list[Product] = [torch_product] * (BUCKETS[-1] + 1)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Product`."""
        num_rows = x.shape[0]
        product = self._by_rows[num_rows] if num_rows <= BUCKETS[-1] else torch_product
        return product(x, weight, bias, dtype, out)

    def choose(self, bucket: int, number: int) -> None:
        """Take candidate `number` from now on."""
        product = self.candidates[bucket][number]
        first = BUCKETS[bucket - 1] + 1 if bucket else 1
        self._by_rows[first : BUCKETS[bucket] + 1] = [product] * (BUCKETS[bucket] + 1 - first)
        logger.debug("Products of up to %d rows with %s %s: %s", BUCKETS[bucket], self.shape, self.dtype, product)

    def fastest(self, bucket: int, time_ms: Callable[[Callable[[], object]], float], device: torch.device) -> int:
        """Return the fastest candidate on random numbers, the library's if equal."""
        out, depth = self.shape
        weight = torch.randn(out, depth, dtype=self.dtype, device=device)
        x = torch.randn(BUCKETS[bucket], depth, dtype=self.dtype, device=device)
        times = [time_ms(partial(product, x, weight, None)) for product in self.candidates[bucket]]
        for product in self.candidates[bucket]:
            product(x, weight, None, torch.float32)  # a form of its own, which is compiled now and not while serving
        times[0] *= _GAIN
        return min(range(len(times)), key=times.__getitem__)


class DecodeGemmLinear:
    """A matrix multiplied by `gemm`."""

    __slots__ = ("_bias", "_weight", "gemm")

    def __init__(self, weight: Tensor, bias: Tensor | None, gemm: Product) -> None:
        self._weight = weight
        self._bias = bias
        self.gemm = gemm

    def __call__(self, x: Tensor) -> Tensor:
        return self.gemm(x, self._weight, self._bias)

    def wide(self, x: Tensor) -> Tensor:
        return self.gemm(x, self._weight, self._bias, torch.float32)

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        return self.gemm(x, self._weight, self._bias, out.dtype, out)


def measure(gemms: Sequence[DecodeGemm], device: torch.device, group: ProcessGroup) -> None:
    """Time the candidates of every shape, and choose; all ranks together, in the order of loading."""
    # Ranks choose alike, so that what they compute alike stays alike. Where their numbers of shapes differ (a
    # vocabulary that does not divide evenly), or memory is short, the library is kept.
    if group.size > 1 and not _same_everywhere(len(gemms), group):
        return
    if not gemms:
        return
    numbers = _measured(gemms, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the copies of weights that were multiplied
    for place, number in enumerate(numbers):
        agreed = group.all_reduce_min(number)
        gemms[place // len(BUCKETS)].choose(place % len(BUCKETS), agreed)


def _measured(gemms: Sequence[DecodeGemm], device: torch.device) -> list[int]:
    """Find the fastest by shape and bucket; the library's once memory has run out."""
    numbers = [0] * (len(gemms) * len(BUCKETS))
    try:
        stopwatch = Stopwatch(device)
        for place in range(len(numbers)):
            numbers[place] = gemms[place // len(BUCKETS)].fastest(place % len(BUCKETS), stopwatch, device)
    except torch.OutOfMemoryError:
        logger.warning("Too little memory to measure decode GEMMs: the library multiplies")
        return [0] * len(numbers)
    return numbers


def _same_everywhere(number: int, group: ProcessGroup) -> bool:
    return group.all_reduce_min(number) == -group.all_reduce_min(-number)
