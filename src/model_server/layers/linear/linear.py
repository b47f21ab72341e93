"""Matrix products, and torch's own kind. A rank holds rows, or columns for a partial sum."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Since torch 2.8 its products on a GPU write float32 themselves.
_WRITES_FLOAT32 = hasattr(torch.ops.aten.mm, "dtype")


class Linear(Protocol):
    """`x @ weight.T + bias`, weight [out, in]; `factory.LinearFactory` chooses the kind."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def wide(self, x: Tensor) -> Tensor:
        """Multiply to float32, unrounded if possible."""


def torch_product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply x [n, in] by weight.T, plus bias, to float32 or x's type."""
    if dtype is None or dtype is x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and bias is None and _WRITES_FLOAT32:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x, weight, bias).to(dtype)


class TorchLinear:
    """Torch's product, for any device and type."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def wide(self, x: Tensor) -> Tensor:
        return torch_product(x, self._weight, self._bias, torch.float32)
