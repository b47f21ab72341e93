"""4-bit codes for sixteen numbers of a table, with a scale per group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_server.quantization.forms import Form, stacked
from model_server.quantization.forms.codes import finer, packed

# The sixteen numbers of bitsandbytes' types (Dettmers et al., arXiv 2305.14314, appendix E), rounded to float32.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(sign * number / 12 + 0.0 for sign in (1, -1) for number in _TWELFTHS)


@dataclass(frozen=True, slots=True)
class TableCodes:
    """Element (i, k) is `table[code[i, k]] * scales[i, k // group]`; the last group may be short."""

    # [out, in / 2] uint8, even columns in the lower bits; [out, in] for an odd number.
    codes: Tensor
    # [out, groups] float32.
    scales: Tensor
    table: Tensor
    group: int
    num_columns: int

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, table: Tensor, group: int) -> TableCodes:
        """codes: [out, in] uint8, none above 15."""
        return cls(packed(codes, 4), scales.float().contiguous(), table, group, codes.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.num_columns

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.table.nbytes

    @property
    def is_packed(self) -> bool:
        """Whether two columns share a byte."""
        return self.codes.shape[1] < self.num_columns

    @property
    def kind(self) -> str:
        groups = "one group a row" if self.scales.shape[1] == 1 else f"groups of {self.group}"
        return f"4 bits of a table, {groups}"

    def rows(self, start: int, stop: int) -> TableCodes:
        """Return rows [start, stop) in shared memory."""
        return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop])

    def permuted(self, rows: Tensor) -> TableCodes:
        """Return the rows `rows` [n] int64."""
        return replace(self, codes=self.codes.index_select(0, rows), scales=self.scales.index_select(0, rows))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Multiply in float32, rounded once to `dtype`."""
        if self.is_packed:
            pairs = torch.stack((self.table.repeat(16), self.table.repeat_interleave(16)), 1)  # of each byte
            values = pairs.index_select(0, self.codes.flatten().int()).view(self.shape)
        else:
            values = self.table[self.codes.long()]
        num_whole = self.num_columns // self.group
        if num_whole:
            whole = values[:, : num_whole * self.group].view(-1, num_whole, self.group)
            whole.mul_(self.scales[:, :num_whole, None])
        if num_whole < self.scales.shape[1]:
            values[:, num_whole * self.group :].mul_(self.scales[:, num_whole:])
        return values.to(dtype)


def cat(forms: Sequence[TableCodes]) -> Form:
    """Join matrices of the same inputs, cutting groups to common ones; other tables stay apart."""
    first = forms[0]
    if len(forms) == 1:
        return first
    if not all(torch.equal(form.table, first.table) for form in forms):
        return stacked(forms)
    group = math.gcd(*(form.group for form in forms))
    if all(form.scales.shape[1] == 1 for form in forms):
        group = first.num_columns
    scales = torch.cat([finer(form.scales, form.group, group, form.num_columns) for form in forms])
    return TableCodes(torch.cat([form.codes for form in forms]), scales, first.table, group, first.num_columns)
