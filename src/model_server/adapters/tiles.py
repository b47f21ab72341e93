"""Rows of a forward in tiles of one adapter, as `kernels/lora` reads them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TILE_ROWS = 16
"""Rows of a tile in steps of up to NARROW_ROWS rows; larger ones are not replayed."""
_WIDE_TILE_ROWS = 64
NARROW_ROWS = 512
UNUSED = -1
"""In place of the adapter of a tile, or of one of its rows: there is none."""


def row_tiles(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Make tiles [tiles, 1 + rows], an adapter's number and its rows, from the rows' numbers [n] (below 0: none)."""
    size = TILE_ROWS if len(numbers) <= NARROW_ROWS else _WIDE_TILE_ROWS
    names, amounts = np.unique(numbers, return_counts=True)
    order = np.argsort(numbers, kind="stable")
    tiles: list[npt.NDArray[np.int32]] = []
    first = 0
    for name, amount in zip(names.tolist(), amounts.tolist(), strict=True):
        if name >= 0:
            group = np.full((-(-amount // size), 1 + size), UNUSED, np.int32)
            group[:, 0] = name
            for place, tile in enumerate(group):
                rows = order[first + place * size : first + min((place + 1) * size, amount)]
                tile[1 : 1 + len(rows)] = rows
            tiles.append(group)
        first += amount
    return np.concatenate(tiles) if tiles else np.zeros((0, 1 + size), np.int32)


def most_tiles(num_rows: int, num_adapters: int) -> int:
    """Bound the tiles of `num_rows` rows with so many adapters."""
    return min(num_rows, (num_rows + min(num_rows, num_adapters) * (TILE_ROWS - 1)) // TILE_ROWS)
