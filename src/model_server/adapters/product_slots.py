"""The matrices of all slots for one product, at fixed device addresses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.adapters.factors import Factors
from model_server.adapters.rows import AdapterRows
from model_server.weights.matrix import Part

# Of outputs, for the kernels: see `kernels/lora_products.py`.
_COLUMNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSizes:
    """The number of slots, and their rank, to which smaller ones are padded."""

    number: int
    rank: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Outputs [start, stop) read inner values from `first`; `kept`: their first row in B."""

    start: int
    stop: int
    first: int
    kept: int


class ProductSlots:
    """What the adapters in slots add to one product; zeros in empty slots."""

    def __init__(
        self,
        parts: Sequence[Part],
        touched: Collection[str],
        inputs: int,
        sizes: SlotSizes,
        dtype: torch.dtype,
        device: torch.device,
        *,
        affine: bool,
    ) -> None:
        """Make the slots of a product.

        Args:
            touched: Parts that adapters may change.
            inputs: This rank's.
            affine: Adapters may have gains and shifts.
        """
        self._rank = sizes.rank
        self._device = device
        self._places: list[_Place] = []
        firsts: dict[str, int] = {}
        start = kept = 0
        for part in parts:
            if part.name in touched:
                first = firsts.setdefault(part.name, len(firsts) * sizes.rank)
                self._places.append(_Place(start, start + part.num_kept, first, kept))
                kept += part.num_kept
            start += part.num_kept
        self._a = torch.zeros(sizes.number, len(firsts) * sizes.rank, inputs, dtype=dtype, device=device)
        self._b = torch.zeros(sizes.number, kept, sizes.rank, dtype=dtype, device=device)
        self._affine: Tensor | None = None
        if affine:
            self._affine = torch.zeros(sizes.number, 2, kept, dtype=torch.float32, device=device)
            self._affine[:, 0] = 1.0

    def write(self, slot: int, factors: Factors | None) -> None:
        """Fill or clear a slot; copies of pinned memory are queued."""
        self._b[slot].zero_()
        self._a[slot].zero_()  # what is left of large numbers would not be 0 times 0
        if self._affine is not None:
            self._affine[slot, 0].fill_(1.0)
            self._affine[slot, 1].zero_()
        if factors is None:
            return
        places = {place.start: place for place in self._places}
        copied: set[int] = set()  # several parts may be of one module
        for e in factors.expansions:
            place, rank = places[e.start], e.b.shape[1]
            if place.first not in copied:
                copied.add(place.first)
                a = self._a[slot, place.first : place.first + rank]
                a.copy_(factors.a[e.first : e.first + rank], non_blocking=True)
            rows = slice(place.kept, place.kept + e.stop - e.start)
            self._b[slot, rows, :rank].copy_(e.b, non_blocking=True)
        for line, changed in enumerate((factors.gain, factors.shift)):
            if changed is None:
                continue
            assert self._affine is not None, "the sizes allow for it"
            for place in self._places:
                rows = slice(place.kept, place.kept + place.stop - place.start)
                self._affine[slot, line, rows].copy_(changed[place.start : place.stop], non_blocking=True)

    def add(self, rows: AdapterRows, x: Tensor, out: Tensor) -> None:
        """Change out [n, outputs], float32 or of x's type, for x [n, in]."""
        own = rows.among(x.shape[0])
        if own.tiles is not None:
            _kernels().add(self._matrices, own.tiles, x, out, self._num_processors)
            return
        own.change(x, out, self._add, range(len(self._a)))

    def _add(self, slot: int, x: Tensor, out: Tensor) -> None:
        inner = F.linear(x, self._a[slot]).to(out.dtype)
        for place in self._places:
            outputs = out[:, place.start : place.stop]
            rows = slice(place.kept, place.kept + place.stop - place.start)
            outputs.addmm_(inner[:, place.first : place.first + self._rank], self._b[slot, rows].to(out.dtype).t())
            if self._affine is not None:
                outputs.mul_(self._affine[slot, 0, rows]).add_(self._affine[slot, 1, rows])

    @cached_property
    def _matrices(self) -> Any:
        columns = [
            (first, min(first + _COLUMNS, place.stop), place.first, place.kept + first - place.start)
            for place in self._places
            for first in range(place.start, place.stop, _COLUMNS)
        ]
        table = torch.tensor(columns, dtype=torch.int32, device=self._device).t().contiguous()
        return _kernels().SlotMatrices(self._a, self._b, self._affine, table)

    @cached_property
    def _num_processors(self) -> int:
        if self._device.type != "cuda":
            return 1
        return torch.cuda.get_device_properties(self._device).multi_processor_count


def _kernels() -> Any:
    from model_server.kernels import lora_products  # needs Triton

    return lora_products
