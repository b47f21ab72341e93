"""Which part of the stored matrices of a layer a rank keeps, and in which order of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_server.weights.reader import Range


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Rows of heads whose rotated pairs are half a head apart in the file, and adjacent in the model.

    rotary_dim: how many rows of a head rotate; those after them stay in their places.
    """

    head_dim: int
    rotary_dim: int

    def apply(self, rows: Tensor) -> Tensor:
        """`rows` [num_heads * head_dim, ...] in the order of the model."""
        ordered = torch.empty_like(rows)
        self.place(ordered, rows)
        return ordered

    def place(self, destination: Tensor, source: Tensor) -> None:
        """`apply` on the way: rows of whole heads from the file to where they belong."""
        half, rest = self.rotary_dim // 2, source.shape[1:]
        to, came = (t.view(-1, self.head_dim, *rest) for t in (destination, source))
        pairs = came[:, : 2 * half].view(-1, 2, half, *rest).transpose(1, 2)
        to[:, : 2 * half].view(-1, half, 2, *rest).copy_(pairs)
        to[:, 2 * half :].copy_(came[:, 2 * half :])


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a stored matrix (and of its bias) that this rank keeps, in this order."""

    name: str  # without `.weight`
    rows: tuple[Range, ...]
    num_rows: int | None  # of the whole matrix; None: at least those that are asked for
    order: HeadOrder | None = None

    @property
    def num_kept(self) -> int:
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSlice:
    """Rows of one or several stored matrices, one after another, and the same columns of each.

    num_columns: of every stored matrix; None: at least those that are asked for. transposed: stored as [in, out].
    expert: which matrix of a tensor that holds those of all `num_experts`. whole: the columns of a whole row, where the
    stored one is longer, since it holds several matrices.
    """

    parts: tuple[Part, ...]
    columns: Range
    num_columns: int | None = None
    transposed: bool = False
    expert: int | None = None
    num_experts: int | None = None
    whole: Range | None = None

    def of(self, parts: tuple[Part, ...]) -> MatrixSlice:
        """The same of some of the matrices."""
        return replace(self, parts=parts)
