"""New rows of embedding and head, and an embedding's matrices, in slots on the device.

They are read by group of rows, which a captured step cannot do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.adapters.factors import EmbeddingFactors, HeadRows, TableRows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """The most new rows of an adapter, and the rank of an embedding's matrices; 0: none."""

    num_rows: int
    rank: int = 0


class EmbeddingSlots:
    """What the adapters in slots change of the embedding [vocabulary, width]."""

    def __init__(
        self, number: int, sizes: RowSizes, vocabulary: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ids = torch.zeros(number, sizes.num_rows, dtype=torch.int64, device=device)
        self._rows = torch.zeros(number, sizes.num_rows, width, dtype=dtype, device=device)
        self._a = torch.zeros(number, vocabulary * sizes.rank, dtype=dtype, device=device)
        self._b = torch.zeros(number, width * sizes.rank, dtype=dtype, device=device)
        self._gain = torch.ones(number, width if sizes.rank else 0, dtype=torch.float32, device=device)

    def write(self, slot: int, factors: EmbeddingFactors) -> EmbeddingFactors:
        """Fill a slot; copies of pinned memory are queued."""
        rows = None
        if factors.rows is not None:
            count = len(factors.rows.ids)
            rows = TableRows(
                _copied(self._ids[slot, :count], factors.rows.ids),
                _copied(self._rows[slot, :count], factors.rows.weight),
            )
        return EmbeddingFactors(
            rows=rows,
            a=None if factors.a is None else _copied(_shaped(self._a[slot], factors.a), factors.a),
            b=None if factors.b is None else _copied(_shaped(self._b[slot], factors.b), factors.b),
            gain=None if factors.gain is None else _copied(self._gain[slot], factors.gain),
        )


class HeadSlots:
    """The rows of the head that the adapters in slots replace."""

    def __init__(self, number: int, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._places = torch.zeros(number, num_rows, dtype=torch.int64, device=device)
        self._rows = torch.zeros(number, num_rows, width, dtype=dtype, device=device)
        self._bias = torch.zeros(number, num_rows, dtype=dtype, device=device)

    def write(self, slot: int, rows: HeadRows) -> HeadRows:
        """Fill a slot; copies of pinned memory are queued."""
        count = len(rows.places)
        return HeadRows(
            _copied(self._places[slot, :count], rows.places),
            _copied(self._rows[slot, :count], rows.weight),
            None if rows.bias is None else _copied(self._bias[slot, :count], rows.bias),
        )


def _shaped(memory: Tensor, tensor: Tensor) -> Tensor:
    return memory[: tensor.numel()].view(tensor.shape)


def _copied(place: Tensor, tensor: Tensor) -> Tensor:
    return place.copy_(tensor, non_blocking=True)
