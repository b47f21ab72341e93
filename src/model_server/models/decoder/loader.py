"""This rank's share of a checkpoint, as layers: whatever sharding and storage orders mean is decided here.

Knows ranges of rows and columns, not what they stand for: the heads of a packed matrix are counted in `attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from model_server.attention.backend import Alibi
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.layers.fused.fused import Fused, TorchFused
from model_server.layers.linear.linear import Linear
from model_server.layers.norm import AddNorm
from model_server.layers.rotary import Rope, interleave_rows
from model_server.weights.reader import Range, WeightReader

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """Rows of heads whose rotated pairs lie half a head apart in the file, and side by side in the model."""

    head_dim: int
    rotary_dim: int

    def apply(self, rows: Tensor) -> Tensor:
        return interleave_rows(rows, self.head_dim, self.rotary_dim)

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
    num_rows: int  # of the whole matrix
    order: HeadOrder | None = None


@dataclass(slots=True)
class Loader:
    """Reads and counts. `ropes` collects the distinct rotations that the layers ask for."""

    reader: WeightReader
    device: torch.device
    group: ProcessGroup
    norm_kind: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_affine: bool = True  # False: layer norms without tensors
    fused: Fused = field(default_factory=TorchFused)
    weight_bytes: int = 0
    ropes: list[Rope] = field(default_factory=list)
    _alibis: dict[tuple[tuple[float, ...], float | None], Alibi] = field(default_factory=dict)

    def share(self, size: int) -> Range:
        """This rank's part of a dimension that must divide evenly."""
        count = self.group.size
        if size % count != 0:
            # TGI's words, spelling included.
            raise StartupError(f"The choosen size {size} is not compatible with sharding on {count} shards")
        share = size // count
        return self.group.rank * share, (self.group.rank + 1) * share

    def rope_index(self, rope: Rope | None) -> int | None:
        """Where `Step.rotations` will hold the rotations of `rope`."""
        if rope is None:
            return None
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def alibi(self, slopes: tuple[float, ...], bfloat16_scale: float | None) -> Alibi:
        """The same object for the same arguments: attention computes the biases of a step once for all its layers."""
        key = (slopes, bfloat16_scale)
        if key not in self._alibis:
            tensor = torch.tensor(slopes, dtype=torch.float32, device=self.device)
            self._alibis[key] = Alibi(tensor, bfloat16_scale)
        return self._alibis[key]

    def has(self, name: str) -> bool:
        return self.reader.has(name)

    def rows(self, name: str, ranges: Sequence[Range], num_columns: int | None = None) -> Tensor:
        """Rows of the tensor `name`, which has `num_columns` columns, or is a vector if that is None."""
        if num_columns is not None:
            self._expect(name, 1, num_columns)
        return self._count(self.reader.rows(name, ranges))

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        return self._count(self.reader.columns(name, start, stop))

    def stacked(self, name: str, index: int, rows: Range, columns: Range) -> Tensor:
        """A part of matrix `index` of the tensor `name` [n, num_rows, num_columns], which must not be smaller."""
        return self._count(self.reader.stacked(name, index, rows, columns))

    def exact(self, name: str, ranges: Sequence[Range]) -> Tensor:
        """Rows in float32, whatever the type of the model: for numbers that are compared or exponentiated."""
        return self._count(self.reader.rows(name, ranges, torch.float32))

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        return self.rows(name, [(0, self.reader.shape(name)[0])])

    def column_linear(self, parts: Sequence[Part], num_columns: int, *, transposed: bool = False) -> Linear:
        """Several layers of the same input as one matrix of this rank's rows.

        transposed: the file holds [in, out]. Biases: all of the layers have one, or none.
        """
        weight = self._empty(sum(stop - start for part in parts for start, stop in part.rows), num_columns)
        biases: list[Tensor | None] = []
        first = 0
        for part in parts:
            last = first + sum(stop - start for start, stop in part.rows)
            self._fill(weight[first:last], part, transposed)
            first = last
            bias = self.rows(part.name + ".bias", part.rows) if self.has(part.name + ".bias") else None
            biases.append(bias if bias is None or part.order is None else part.order.apply(bias))
        present = [b for b in biases if b is not None]
        if present and len(present) < len(biases):
            raise StartupError(f"weight {parts[0].name}.bias and its neighbours must all exist or none")
        return Linear(self._count(weight), torch.cat(present) if present else None)

    def _fill(self, out: Tensor, part: Part, transposed: bool) -> None:
        """Read the rows of one part into their place: the fused matrix has no second copy."""
        name = part.name + ".weight"
        self._expect(name, int(transposed), part.num_rows)
        if not transposed and part.order is None:
            self._expect(name, 1, out.shape[1])
            self.reader.rows_into(out, name, part.rows)
        elif not transposed and part.order is not None:
            self._expect(name, 1, out.shape[1])
            self.reader.rows_into(out, name, part.rows, place=part.order.place, unit=part.order.head_dim)
        else:
            self._expect(name, 0, out.shape[1])
            first = 0
            for start, stop in part.rows:
                self.reader.columns_into(out[first : first + stop - start].t(), name, start, stop)
                first += stop - start
            if part.order is not None:
                out.copy_(part.order.apply(out))

    def _empty(self, num_rows: int, num_columns: int) -> Tensor:
        return torch.empty(num_rows, num_columns, dtype=self.reader.dtype, device=self.device)

    def row_linear(self, name: str, columns: Range, num_rows: int, *, transposed: bool = False) -> Linear:
        """This rank's columns of a matrix. Summed over the ranks, its bias must count once: rank 0 has it."""
        if transposed:
            weight = self.rows(name + ".weight", [columns], num_rows).t().contiguous()
        else:
            self._expect(name + ".weight", 0, num_rows)
            weight = self.columns(name + ".weight", *columns)
        with_bias = self.group.rank == 0 and self.has(name + ".bias")
        return Linear(weight, self.rows(name + ".bias", [(0, num_rows)]) if with_bias else None)

    def norm(self, name: str, size: int) -> AddNorm:
        """A norm over `size` numbers of every token, the same on every rank."""
        if not self.norm_affine:
            return self.fused.layer_norm(None, None, self.norm_eps)
        bias = self.rows(name + ".bias", [(0, size)]) if self.has(name + ".bias") else None
        return self.norm_of(self.rows(name + ".weight", [(0, size)]), bias)

    def norm_of(self, weight: Tensor, bias: Tensor | None) -> AddNorm:
        """A norm of the model's kind with a stored weight [n] or [heads, n]."""
        if self.norm_offset:
            weight = weight.float() + self.norm_offset
        if self.norm_kind == "layer":
            return self.fused.layer_norm(weight, bias, self.norm_eps)
        return self.fused.rms_norm(weight, self.norm_eps)

    def _expect(self, name: str, dimension: int, size: int) -> None:
        shape = self.reader.shape(name)
        if len(shape) != 2 or shape[dimension] != size:
            raise StartupError(
                f"weight {name} has shape {list(shape)}; the config asks for {size} at dimension {dimension}"
            )

    def _count(self, tensor: Tensor) -> Tensor:
        self.weight_bytes += tensor.nbytes
        return tensor
