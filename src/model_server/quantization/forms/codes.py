"""Whole numbers of up to 8 bits, with scale and zero point per group and row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_server.quantization.forms import Form, stacked

E2M1 = tuple(12 + sign * twice for sign in (1, -1) for twice in (0, 1, 2, 3, 4, 6, 8, 12))
"""Levels of 4-bit floats: twice 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, counted from the least. zeros: 12."""


@dataclass(frozen=True, slots=True)
class Order:
    """Columns kept in another order, so that groups are adjacent."""

    # [kept columns] int32: each one's input. An input may occur again with zeros.
    columns: Tensor
    # Of the matrix.
    num_inputs: int

    def equals(self, other: Order | None) -> bool:
        return other is not None and self.num_inputs == other.num_inputs and torch.equal(self.columns, other.columns)


@dataclass(frozen=True, slots=True)
class Codes:
    """Element (i, k) is `(number[i, k] - zeros[i, k // group]) * scales[i, k // group]`; the last group may be
    short.
    """

    # [out, columns] uint8; of 4 bits [out, columns / 2], even columns in the lower bits.
    codes: Tensor
    # [out, groups], floating; zeros: [out, groups] uint8.
    scales: Tensor
    zeros: Tensor
    group: int
    num_columns: int
    order: Order | None = None
    # The sixteen numbers that 4-bit codes stand for; None: themselves.
    levels: tuple[int, ...] | None = None
    bits: int = 8
    # [out] float32: scales are these times e4m3 floats; None: any numbers.
    factors: Tensor | None = None

    @classmethod
    def of(
        cls, codes: Tensor, scales: Tensor, zeros: Tensor, group: int, bits: int, order: Order | None = None
    ) -> Codes:
        """Make a form of codes [out, columns] uint8 below `2 ** bits`."""
        num_columns = codes.shape[1]
        return cls(packed(codes, bits), scales.contiguous(), zeros.contiguous(), group, num_columns, order, bits=bits)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.num_columns if self.order is None else self.order.num_inputs

    @property
    def nbytes(self) -> int:
        size = self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes
        return size if self.order is None else size + self.order.columns.nbytes

    @property
    def is_packed(self) -> bool:
        """Whether two columns share a byte."""
        return self.codes.shape[1] < self.num_columns

    @property
    def kind(self) -> str:
        groups = "one group a row" if self.scales.shape[1] == 1 else f"groups of {self.group}"
        if self.levels is not None:
            return f"4-bit floats, {groups}"
        return f"{4 if self.is_packed else max(self.bits, 5)} bits, {groups}"

    def rows(self, start: int, stop: int) -> Codes:
        """Return rows [start, stop) in shared memory."""
        kept = slice(start, stop)
        factors = None if self.factors is None else self.factors[kept]
        return replace(self, codes=self.codes[kept], scales=self.scales[kept], zeros=self.zeros[kept], factors=factors)

    def permuted(self, rows: Tensor) -> Codes:
        """Return the rows `rows` [n] int64."""
        codes, scales, zeros = (t.index_select(0, rows) for t in (self.codes, self.scales, self.zeros))
        factors = None if self.factors is None else self.factors.index_select(0, rows)
        return replace(self, codes=codes, scales=scales, zeros=zeros, factors=factors)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Multiply in float32, rounded once to `dtype`."""
        values = self.unpacked().float()
        values.sub_(self._spread(self.zeros)).mul_(self._spread(self.scales.float()))
        if self.order is not None:
            values = values.new_zeros(self.shape).index_add_(1, self.order.columns, values)
        return values.to(dtype)

    def unpacked(self) -> Tensor:
        """The numbers [out, columns] uint8."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), 2).flatten(1) if self.is_packed else self.codes
        if self.levels is None:
            return codes
        levels = torch.tensor(self.levels, dtype=torch.uint8, device=codes.device)
        return levels.index_select(0, codes.flatten().int()).view(codes.shape)

    def _spread(self, of_groups: Tensor) -> Tensor:
        """Spread [out, groups] to [out, columns], or [out, 1] for one group."""
        if of_groups.shape[1] == 1:
            return of_groups
        return of_groups.repeat_interleave(self.group, 1)[:, : self.num_columns]


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [out, columns] uint8."""
    if bits <= 4 and codes.shape[1] % 2 == 0:
        return codes[:, ::2] | codes[:, 1::2] << 4
    return codes


def cat(forms: Sequence[Codes]) -> Form:
    """Join matrices of the same inputs, cutting groups to common ones; unlike ones stay apart."""
    first = forms[0]
    if len(forms) == 1:
        return first
    if not all(_same_columns(first, form) for form in forms):
        return stacked(forms)
    group = math.gcd(*(form.group for form in forms))
    if all(form.scales.shape[1] == 1 for form in forms):
        group = first.num_columns
    dtype = first.scales.dtype
    if any(form.scales.dtype != dtype for form in forms):
        dtype = torch.float32
    scales = [finer(form.scales, form.group, group, form.num_columns).to(dtype) for form in forms]
    zeros = [finer(form.zeros, form.group, group, form.num_columns) for form in forms]
    codes, bits = torch.cat([form.codes for form in forms]), max(form.bits for form in forms)
    factors = [form.factors for form in forms if form.factors is not None]
    return replace(
        first, codes=codes, scales=torch.cat(scales), zeros=torch.cat(zeros), group=group, bits=bits,
        factors=torch.cat(factors) if len(factors) == len(forms) else None,
    )  # fmt: skip


def _same_columns(one: Codes, other: Codes) -> bool:
    if one.is_packed != other.is_packed or one.num_columns != other.num_columns or one.levels != other.levels:
        return False
    return other.order is None if one.order is None else one.order.equals(other.order)


def finer(of_groups: Tensor, group: int, smaller: int, num_columns: int) -> Tensor:
    """Repeat [out, groups] for smaller groups."""
    firsts = torch.arange(0, num_columns, smaller, device=of_groups.device)
    return of_groups[:, firsts // group]
