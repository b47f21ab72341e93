"""Measures at loading whether a matrix goes into our panels or oneDNN's layout.

It goes one way for any number of rows: it is in memory once, and in panels a row does not depend on others, which
oneDNN's bfloat16 does not promise.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model_server.cpp.library import instruction_set
from model_server.layers.linear import tile_rows
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.onednn import LARGEST_UNPACKED_ROW, OneDnnLinear, Packer
from model_server.layers.linear.packed import PackedLinear
from model_server.memory.huge_pages import Arena

logger = logging.getLogger(__name__)

# Smaller matrices go into panels: they take no time worth the measurement, and oneDNN would keep a second copy of them
# for single rows, whose numbers would be others than those of many.
SMALLEST_MEASURED = LARGEST_UNPACKED_ROW + 1
# Larger matrices are measured with as many outputs: a matrix takes 20 to 100 ms, and those of equal inputs share it.
MOST_MEASURED = 1 << 20
_WHOLE = 64  # outputs fill panels
# A client, some, many, a chunk of prompts.
ROWS = (1, 8, 32, 256)
_REPEATS = 3
# oneDNN must be this much faster, as the geometric mean over ROWS: blocks whose matrices are all in panels run in one
# call, and a choice that changes from one start to the next changes the last bits of numbers.
MARGIN = 1.15

# Seconds that one product of these rows takes.
TimeOf = Callable[[Linear, Tensor], float]


def processor_time(product: Linear, x: Tensor) -> float:
    """Time the calling thread alone, without other work of the machine."""
    start = time.thread_time()
    product(x)
    return time.thread_time() - start


class PanelChoice:
    """Measures each shape of one model's type once."""

    def __init__(self, packer: Packer | None, time_of: TimeOf = processor_time) -> None:
        """Take oneDNN's packer; without one all go into panels."""
        self._packer = packer
        self._time_of = time_of
        self._gains: dict[tuple[int, ...], float] = {}
        self._tile_rows: int | None = None  # not chosen, or no tiles here

    def takes(self, weight: Tensor) -> bool:
        if self._packer is None or weight.numel() < SMALLEST_MEASURED:
            return True
        sample = weight[: max(_WHOLE, MOST_MEASURED // weight.shape[1] // _WHOLE * _WHOLE)]
        shape = tuple(sample.shape)
        if shape not in self._gains:
            self._gains[shape] = self._gain(sample, self._packer)
            logger.debug("Products with %s in panels: %.2f times as fast as oneDNN's", shape, self._gains[shape])
        return _stays(self._gains[shape])

    def log(self) -> None:
        """One line for the model."""
        if not self._gains:
            return
        tiles = "" if self._tile_rows is None else f", tiles from {self._tile_rows} rows"
        ours = f"C++ operators ({instruction_set()}{tiles})"
        lost = [1 / gain for gain in self._gains.values() if not _stays(gain)]
        if lost:
            number = f"{len(lost)} of {len(self._gains)}"
            logger.info("Matrix products: oneDNN for %s shapes, %s times as fast as %s", number, _range(lost), ours)
        else:
            gains = list(self._gains.values())
            logger.info("Matrix products: %s, %s times as fast as oneDNN (shapes: %d)", ours, _range(gains), len(gains))

    def _gain(self, weight: Tensor, packer: Packer) -> float:
        """Return how many times as fast panels are, by geometric mean over ROWS on one thread."""
        with _one_thread(), torch.inference_mode():
            panels, onednn = PackedLinear(weight, None, Arena()), OneDnnLinear(weight, None, packer)
            if self._tile_rows is None and tile_rows.are_used(panels):
                self._tile_rows = tile_rows.choose(panels, self._time_of)
            ratios = [self._ratio(panels, onednn, rows) for rows in ROWS]
        return statistics.geometric_mean(ratios)

    def _ratio(self, panels: PackedLinear, onednn: Linear, rows: int) -> float:
        x = torch.ones(rows, panels.inputs, dtype=panels.panels.dtype)
        times = [(self._time_of(panels, x), self._time_of(onednn, x)) for _ in range(1 + _REPEATS)]
        del times[0]  # it prepares
        ours, theirs = (min(column) for column in zip(*times, strict=True))
        return theirs / ours if ours > 0 and theirs > 0 else 1.0  # the system's clock of threads is too coarse to tell


def _stays(gain: float) -> bool:
    return gain * MARGIN >= 1


def _range(factors: list[float]) -> str:
    low, high = f"{min(factors):.1f}", f"{max(factors):.1f}"
    return low if low == high else f"{low} to {high}"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
