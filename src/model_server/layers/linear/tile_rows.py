"""From how many rows on products use AMX tiles, measured at loading; results do not depend on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_server.cpp.library import instruction_set, prepared
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.packed import PackedLinear

# Tiles are used for this many rows in any case, and for fewer where that is faster.
MOST = 8
_FEWER = (4, 2, 1)
_REPEATS = 3
# Tiles take inputs in steps of this size (tiles.hpp); others never use them.
_STEP = 32


def are_used(panels: PackedLinear) -> bool:
    """Whether products with this matrix can use tiles here."""
    return instruction_set() == "amx" and panels.panels.dtype == torch.bfloat16 and panels.inputs % _STEP == 0


def choose(panels: PackedLinear, time_of: Callable[[Linear, Tensor], float]) -> int:
    """Set the smallest number of rows from which tiles are faster, for all matrices."""
    set_tile_rows = prepared().cpp_set_tile_rows

    def seconds(rows: int, tile_rows: int) -> float:
        set_tile_rows(tile_rows)
        return time_of(panels, torch.ones(rows, panels.inputs, dtype=panels.panels.dtype))

    chosen = MOST
    for rows in _FEWER:
        times = [(seconds(rows, 1), seconds(rows, MOST)) for _ in range(1 + _REPEATS)]
        del times[0]  # it prepares
        if min(tiles for tiles, _ in times) >= min(vectors for _, vectors in times):
            break
        chosen = rows
    set_tile_rows(chosen)
    return chosen
