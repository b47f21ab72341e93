"""Forms of a weight matrix in memory. Formats of files are read into forms, and products are made from forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Form(Protocol):
    """A matrix [out, in], however its numbers are kept."""

    @property
    def nbytes(self) -> int:
        """The memory that it takes, scales included."""

    def permuted(self, rows: Tensor) -> Form:
        """Row i of the result is row `rows[i]`; rows: [n] int64 on the form's device."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in] in floating point. It may share the form's memory: not to be written to."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers as they are. weight: [out, in], floating point."""

    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def permuted(self, rows: Tensor) -> Plain:
        return Plain(self.weight.index_select(0, rows))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)
