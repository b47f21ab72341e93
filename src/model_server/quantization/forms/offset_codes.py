"""Whole numbers with a scale and a subtracted number per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.quantization.forms import Form, stacked
from model_server.quantization.forms import codes as plain_codes
from model_server.quantization.forms.codes import Codes


@dataclass(frozen=True, slots=True)
class OffsetCodes:
    """Element (i, k) is that of `codes`, less `offsets[i, k // group]`."""

    # Without an order of their own.
    codes: Codes
    offsets: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.offsets.nbytes

    @property
    def kind(self) -> str:
        return f"{self.codes.kind} with offsets"

    def rows(self, start: int, stop: int) -> OffsetCodes:
        """Return rows [start, stop) in shared memory."""
        return OffsetCodes(self.codes.rows(start, stop), self.offsets[start:stop])

    def permuted(self, rows: Tensor) -> OffsetCodes:
        """Return the rows `rows` [n] int64."""
        return OffsetCodes(self.codes.permuted(rows), self.offsets.index_select(0, rows))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Compute in float32, rounded once to `dtype`."""
        values = self.codes.dequantize(torch.float32)
        spread = self.offsets.repeat_interleave(self.codes.group, 1)[:, : self.codes.num_columns]
        return values.sub_(spread).to(dtype)


def cat(forms: Sequence[OffsetCodes]) -> Form:
    """Join matrices of the same inputs; unlike ones stay apart."""
    first = forms[0].codes
    if any(form.codes.group != first.group or form.codes.is_packed != first.is_packed for form in forms):
        return stacked(forms)
    merged = plain_codes.cat([form.codes for form in forms])
    if not isinstance(merged, Codes) or merged.group != first.group:
        return stacked(forms)
    return OffsetCodes(merged, torch.cat([form.offsets for form in forms]))
