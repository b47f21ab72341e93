"""Which part of stored matrices a rank keeps, in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_server.weights.reader import Range


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Heads whose rotated pairs are half a head apart in the file, adjacent in the model; `rotary_dim` rows rotate."""

    head_dim: int
    rotary_dim: int

    def apply(self, rows: Tensor) -> Tensor:
        """Reorder `rows` [num_heads * head_dim, ...]."""
        ordered = torch.empty_like(rows)
        self.place(ordered, rows)
        return ordered

    def place(self, destination: Tensor, source: Tensor) -> None:
        """Apply the order while copying whole heads."""
        half, rest = self.rotary_dim // 2, source.shape[1:]
        to, came = (t.view(-1, self.head_dim, *rest) for t in (destination, source))
        pairs = came[:, : 2 * half].view(-1, 2, half, *rest).transpose(1, 2)
        to[:, : 2 * half].view(-1, half, 2, *rest).copy_(pairs)
        to[:, 2 * half :].copy_(came[:, 2 * half :])


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a matrix and bias that this rank keeps, in order."""

    name: str  # without `.weight`
    rows: tuple[Range, ...]
    num_rows: int | None  # of the whole matrix; None: at least those that are asked for
    order: HeadOrder | None = None

    @property
    def num_kept(self) -> int:
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSlice:
    """Rows of stored matrices in turn, and the same columns of each."""

    parts: tuple[Part, ...]
    columns: Range
    # Of each stored matrix; None: at least those asked for.
    num_columns: int | None = None
    transposed: bool = False
    # In a tensor of `num_experts` matrices.
    expert: int | None = None
    num_experts: int | None = None
    # Columns of a row, where stored rows hold several matrices.
    whole: Range | None = None

    def of(self, parts: tuple[Part, ...]) -> MatrixSlice:
        """Take some of the matrices."""
        return replace(self, parts=parts)
