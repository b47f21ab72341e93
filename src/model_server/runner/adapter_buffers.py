"""Fixed addresses of rows' adapters in captured steps."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.adapters.rows import BASE, AdapterRows
from model_server.adapters.tiles import TILE_ROWS, UNUSED, most_tiles


class AdapterBuffers:
    """Tiles and slots of up to `max_rows` rows; 0 slots: no adapters."""

    def __init__(self, max_rows: int, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        shape = most_tiles(max_rows, num_slots), 1 + TILE_ROWS
        self._tiles = torch.full(shape, UNUSED, dtype=torch.int32, device=device)
        self._slots = torch.full((max_rows if num_slots else 0,), BASE, dtype=torch.int32, device=device)

    def of(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the first rows' tiles and slots."""
        return self._tiles[: most_tiles(num_rows, self._num_slots)], self._slots[:num_rows]

    def fill(self, tiles: Tensor | None, slots: Tensor | None, num_rows: int) -> None:
        """Copy a step's tiles and slots, with padding up to `num_rows`."""
        assert tiles is not None and slots is not None, "such steps alone are replayed"
        used = tiles.shape[0]
        self._tiles[:used].copy_(tiles)
        self._tiles[used : most_tiles(num_rows, self._num_slots), 0].fill_(UNUSED)
        self._slots[: slots.shape[0]].copy_(slots)
        self._slots[slots.shape[0] : num_rows].fill_(BASE)


def captured_rows(
    buffers: AdapterBuffers, num_rows: int, kept: tuple[AdapterBuffers, int] | None = None
) -> AdapterRows:
    """Return what a captured step reads; `kept`: of rows that continue, if fewer."""
    # Which rows have which adapter is on the device alone.
    numbers = torch.full((num_rows,), BASE)
    tiles, slots = buffers.of(num_rows)
    if kept is None:
        return AdapterRows(numbers, numbers, tiles.device, tiles, tiles, slots, slots)
    kept_tiles, kept_slots = kept[0].of(kept[1])
    return AdapterRows(numbers, numbers[: kept[1]], tiles.device, tiles, kept_tiles, slots, kept_slots)
