"""Matrix products: what every kind gives, and the kind that torch's own product is enough for.

A rank holds some rows of a matrix, or some columns: then its product is a partial sum of the whole.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Since torch 2.8 its products on a GPU write float32 themselves.
_WRITES_FLOAT32 = hasattr(torch.ops.aten.mm, "dtype")


class Linear(Protocol):
    """`x @ weight.T + bias`; weight [out, in], bias [out] or none. `factory.LinearFactory` chooses the kind."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out], both of the model's type."""

    def wide(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out] in float32, not rounded to the model's type first where that can be avoided."""


def torch_product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """x [n, in] @ weight.T + bias -> [n, out] in float32 if that is `dtype`, else in the type of `x`."""
    if dtype is None or dtype is x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and bias is None and _WRITES_FLOAT32:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x, weight, bias).to(dtype)


class TorchLinear:
    """The product as torch has it, for any device and type."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def wide(self, x: Tensor) -> Tensor:
        return torch_product(x, self._weight, self._bias, torch.float32)
