"""Which rows of a forward get which adapter."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.kernels.availability import usable
from model_server.memory.transfer import upload

# Rows one after another, or [n] int64.
RowIndex = slice | Tensor
Groups = tuple[tuple[int, RowIndex], ...]
Change = Callable[[int, Tensor, Tensor], None]

BASE = -1
"""In place of an adapter's number: the base model."""


TILE_ROWS = 16
"""Rows of a tile in steps of up to NARROW_ROWS rows; larger ones are not replayed."""
_WIDE_TILE_ROWS = 64
NARROW_ROWS = 512
UNUSED = -1
"""In place of the adapter of a tile, or of one of its rows: there is none."""


class RowAdapters:
    """The adapter of each of some rows, as products read it."""

    __slots__ = ("_device", "_groups", "numbers", "slots", "tiles")

    def __init__(
        self, numbers: Tensor, device: torch.device, tiles: Tensor | None = None, slots: Tensor | None = None
    ) -> None:
        # int64 on the host; BASE: none.
        self.numbers = numbers
        # As `kernels/lora_products.py` reads the rows, on the device; None without kernels.
        self.tiles = tiles
        # int32 on the device.
        self.slots = slots
        self._device = device
        self._groups: Groups | None = None

    @property
    def groups(self) -> Groups:
        """Return the rows of each adapter."""
        if self._groups is None:
            self._groups = _groups(self.numbers.numpy(), self._device)
        return self._groups

    def change(self, x: Tensor, out: Tensor, change: Change, some: Container[int]) -> None:
        """Call `change` with the number and rows of x and out of each adapter of `some`."""
        for number, index in self.groups:
            if number not in some:
                continue
            if isinstance(index, slice):
                change(number, x[index], out[index])
                continue
            part = out.index_select(0, index)
            change(number, x.index_select(0, index), part)
            out.index_copy_(0, index, part)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapter of each token's row, and of the rows that continue after the last attention."""

    all: RowAdapters
    kept: RowAdapters

    def among(self, num_rows: int) -> RowAdapters:
        """Return those of all tokens or of kept rows, by their count: equal counts mean equal rows."""
        return self.kept if num_rows == len(self.kept.numbers) else self.all


class UniformRows(AdapterRows):
    """Any number of rows with one adapter."""

    def __init__(self, number: int, device: torch.device) -> None:
        whole = RowAdapters(torch.empty(0, dtype=torch.int64), device)
        whole._groups = ((number, slice(None)),)
        super().__init__(whole, whole)

    def among(self, num_rows: int) -> RowAdapters:
        (number, _), *_ = self.all.groups
        return RowAdapters(torch.full((num_rows,), number), self.all._device)


@dataclass(slots=True)
class CurrentRows:
    """The rows of the running forward, set by the decoder and read by its linear layers; None: base only."""

    rows: AdapterRows | None = None


class AdapterBuffers:
    """Fixed addresses of the tiles and slots of up to `max_rows` rows of captured steps; 0 slots: no adapters."""

    def __init__(self, max_rows: int, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        shape = most_tiles(max_rows, num_slots), 1 + TILE_ROWS
        self._tiles = torch.full(shape, UNUSED, dtype=torch.int32, device=device)
        self._slots = torch.full((max_rows if num_slots else 0,), BASE, dtype=torch.int32, device=device)

    def of(self, num_rows: int) -> RowAdapters:
        """Return what a captured step reads: which rows have which adapter is on the device alone."""
        tiles, slots = self._tiles[: most_tiles(num_rows, self._num_slots)], self._slots[:num_rows]
        return RowAdapters(torch.full((num_rows,), BASE), tiles.device, tiles, slots)

    def fill(self, rows: RowAdapters, num_rows: int) -> None:
        """Copy a step's tiles and slots, with padding up to `num_rows`."""
        tiles, slots = rows.tiles, rows.slots
        assert tiles is not None and slots is not None, "such steps alone are replayed"
        used = tiles.shape[0]
        self._tiles[:used].copy_(tiles)
        self._tiles[used : most_tiles(num_rows, self._num_slots), 0].fill_(UNUSED)
        self._slots[: slots.shape[0]].copy_(slots)
        self._slots[slots.shape[0] : num_rows].fill_(BASE)


def adapter_rows(
    numbers: npt.NDArray[np.int64], kept: npt.NDArray[np.int64] | None, device: torch.device
) -> AdapterRows | None:
    """Group the rows by adapter; None if all are the base model's.

    Args:
        numbers: Of each token, or BASE.
        kept: Rows that continue, ascending; None: all.
    """
    if (numbers == BASE).all():
        return None
    all_rows = _row_adapters(numbers, device)
    return AdapterRows(all_rows, all_rows if kept is None else _row_adapters(numbers[kept], device))


def _row_adapters(numbers: npt.NDArray[np.int64], device: torch.device) -> RowAdapters:
    of_rows = torch.from_numpy(numbers.astype(np.int64))
    if not usable(device):
        return RowAdapters(of_rows, device)
    tiles = upload(torch.from_numpy(row_tiles(numbers)), device)
    return RowAdapters(of_rows, device, tiles, upload(of_rows.int(), device))


def _groups(numbers: npt.NDArray[np.int64], device: torch.device) -> Groups:
    found: list[tuple[int, RowIndex]] = []
    for number in np.unique(numbers).tolist():
        if number == BASE:
            continue
        rows = np.flatnonzero(numbers == number)
        first, last = int(rows[0]), int(rows[-1]) + 1
        whole = last - first == len(rows)
        found.append((number, slice(first, last) if whole else upload(torch.from_numpy(rows), device)))
    return tuple(found)


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
