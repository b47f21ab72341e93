"""Which rows of a forward get which adapter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.adapters.tiles import TILE_ROWS, UNUSED, most_tiles, row_tiles
from model_server.kernels.availability import usable
from model_server.memory.transfer import upload

# Rows one after another, or [n] int64.
RowIndex = slice | Tensor
Groups = tuple[tuple[int, RowIndex], ...]

BASE = -1
"""In place of an adapter's number: the base model."""


class AdapterRows:
    """The adapter of each token's row, and (`kept_…`) of the rows that continue after the last attention."""

    __slots__ = (
        "_device", "_groups", "_kept", "kept_numbers", "kept_slots", "kept_tiles", "numbers", "slots", "tiles",
    )  # fmt: skip

    def __init__(
        self,
        numbers: Tensor,
        kept_numbers: Tensor,
        device: torch.device,
        tiles: Tensor | None = None,
        kept_tiles: Tensor | None = None,
        slots: Tensor | None = None,
        kept_slots: Tensor | None = None,
    ) -> None:
        # int64 on the host; BASE: none.
        self.numbers = numbers
        self.kept_numbers = kept_numbers
        # As `kernels/lora` reads the rows, on the device; None without kernels.
        self.tiles = tiles
        self.kept_tiles = kept_tiles
        # int32 on the device.
        self.slots = slots
        self.kept_slots = kept_slots
        self._device = device
        self._groups: Groups | None = None
        self._kept: Groups | None = None

    @property
    def has_narrow_tiles(self) -> bool:
        """Whether tiles have the size of captured steps."""
        return self.tiles is not None and self.tiles.shape[1] == 1 + TILE_ROWS

    @property
    def groups(self) -> Groups:
        """Return the rows of each adapter among all tokens."""
        if self._groups is None:
            self._groups = _groups(self.numbers.numpy(), self._device)
        return self._groups

    @property
    def kept(self) -> Groups:
        """Return the rows of each among those that continue."""
        if self._kept is None:
            is_same = self.kept_numbers is self.numbers
            self._kept = self.groups if is_same else _groups(self.kept_numbers.numpy(), self._device)
        return self._kept

    def among(self, num_rows: int) -> Groups:
        """Return the groups of all tokens or of kept rows, by their count: equal counts mean equal rows."""
        return self.kept if num_rows == len(self.kept_numbers) else self.groups

    def numbers_among(self, num_rows: int) -> Tensor:
        """Return each row's adapter number."""
        return self.kept_numbers if num_rows == len(self.kept_numbers) else self.numbers

    def tiles_among(self, num_rows: int) -> Tensor | None:
        return self.kept_tiles if num_rows == len(self.kept_numbers) else self.tiles

    def slots_among(self, num_rows: int) -> Tensor | None:
        """Return each row's slot, on the device."""
        return self.kept_slots if num_rows == len(self.kept_numbers) else self.slots


class UniformRows(AdapterRows):
    """Any number of rows with one adapter."""

    __slots__ = ("_number",)

    def __init__(self, number: int, device: torch.device) -> None:
        super().__init__(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), device)
        self._number = number

    @property
    def groups(self) -> Groups:
        return ((self._number, slice(None)),)

    def among(self, num_rows: int) -> Groups:
        return self.groups

    def numbers_among(self, num_rows: int) -> Tensor:
        return torch.full((num_rows,), self._number)


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
    of_tokens = torch.from_numpy(numbers.astype(np.int64))
    of_kept = of_tokens if kept is None else of_tokens[torch.from_numpy(kept)]
    if not usable(device):
        return AdapterRows(of_tokens, of_kept, device)
    tiles, slots = _on_device(of_tokens, device)
    kept_tiles, kept_slots = (tiles, slots) if kept is None else _on_device(of_kept, device)
    return AdapterRows(of_tokens, of_kept, device, tiles, kept_tiles, slots, kept_slots)


def _on_device(numbers: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    return upload(torch.from_numpy(row_tiles(numbers.numpy())), device), upload(numbers.int(), device)


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
