"""What a LoRA adapter adds to a product, the embedding and the head, as this rank's tensors.

Embedding and head are computed in float64: float sums depend on the number of rows, and a row is to be the same in any
batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")


def pinned(held: T) -> T:
    """Return tensors, or what holds some, in pinned memory, from which a device copies without the host."""
    found: Any = held
    if isinstance(held, Tensor):
        found = held.pin_memory() if torch.cuda.is_available() else held
    elif isinstance(held, tuple):
        found = tuple(map(pinned, held))
    elif is_dataclass(held):
        found = replace(held, **{field.name: pinned(getattr(held, field.name)) for field in fields(held)})  # type: ignore[type-var]
    return found  # type: ignore[no-any-return]


def held_bytes(*tensors: Tensor | None) -> int:
    """Return the bytes of memory; torch rounds pinned tensors up to powers of 2."""
    found = (t for t in tensors if t is not None)
    return sum(1 << (t.nbytes - 1).bit_length() if t.nbytes and t.is_pinned() else t.nbytes for t in found)


@dataclass(frozen=True, slots=True)
class Expansion:
    """One B [stop - start, rank], for outputs [start, stop), from the inner values at `first` on."""

    start: int
    stop: int
    first: int
    b: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """One adapter's matrices for one product, this rank's part, in the model's type; the Bs are scaled."""

    # [inner, in], of one or several modules with the same input.
    a: Tensor
    expansions: tuple[Expansion, ...]
    # [outputs] float32: multiplies the outputs, before shift [outputs] is added.
    gain: Tensor | None = None
    shift: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return held_bytes(self.a, self.gain, self.shift, *(e.b for e in self.expansions))

    def add(self, x: Tensor, out: Tensor) -> None:
        """Change out [n, outputs], float32 or of x's type, for x [n, in]."""
        inner = F.linear(x, self.a).to(out.dtype)
        for e in self.expansions:
            out[:, e.start : e.stop].addmm_(inner[:, e.first : e.first + e.b.shape[1]], e.b.to(out.dtype).t())
        if self.gain is not None:
            out.mul_(self.gain)
        if self.shift is not None:
            out.add_(self.shift)


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows instead of the base model's: ids [n] int64, ascending; weight [n, width]."""

    ids: Tensor
    weight: Tensor

    @property
    def nbytes(self) -> int:
        return held_bytes(self.ids, self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFactors:
    """One adapter's change of the embedding: other rows, or products that are added."""

    rows: TableRows | None = None
    # [vocabulary, rank]; b [width, rank] has the scale; gain [width] float32 multiplies columns.
    a: Tensor | None = None
    b: Tensor | None = None
    gain: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return held_bytes(self.a, self.b, self.gain) + (0 if self.rows is None else self.rows.nbytes)

    def of(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Change the base model's rows [n, width] of ids [n]."""
        out = hidden
        if self.rows is not None and len(self.rows.ids):
            at = torch.searchsorted(self.rows.ids, ids).clamp_(max=len(self.rows.ids) - 1)
            out = torch.where((self.rows.ids[at] == ids)[:, None], self.rows.weight[at], out)
        if self.a is not None and self.b is not None:
            out = out.float() + F.linear(F.embedding(ids, self.a).double(), self.b.double()).float()
        if self.gain is not None:
            out = out * self.gain
        return out.to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of a head instead of the base model's."""

    # [n]: among this rank's rows; bias [n]: of the base model.
    places: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return held_bytes(self.places, self.weight, self.bias)

    def replace(self, x: Tensor, out: Tensor, index: slice | Tensor) -> None:
        """Change the rows `index` of out [rows, outputs], from x [rows, width]."""
        values = F.linear(x[index].double(), self.weight.double()).to(out.dtype)
        if self.bias is not None:
            values += self.bias
        if isinstance(index, slice):
            out[index][:, self.places] = values
        else:
            out[index[:, None], self.places] = values


def joined(
    modules: list[tuple[Tensor, Tensor, int]], gain: Tensor | None = None, shift: Tensor | None = None
) -> Factors:
    """Join the matrices of modules: A [rank, in], B [rows, rank], and B's first output."""
    matrices: list[Tensor] = []
    expansions: list[Expansion] = []
    first = 0
    for a, b, start in modules:
        if not matrices or a is not matrices[-1]:
            first = sum(m.shape[0] for m in matrices)
            matrices.append(a)
        expansions.append(Expansion(start, start + b.shape[0], first, b))
    return Factors(a=torch.cat(matrices), expansions=tuple(expansions), gain=gain, shift=shift)
