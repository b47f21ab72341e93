"""Matrix products, and torch's own kind. A rank holds rows, or columns for a partial sum."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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


@runtime_checkable
class WritingLinear(Linear, Protocol):
    """A `Linear` that can write into memory of its caller."""

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        """Do `wide` into `out` [n, out] float32, and return it."""


def wide_into(linear: Linear, x: Tensor, out: Tensor | None) -> Tensor:
    """Do `linear.wide`, into `out` if given and `linear` can write there, else into memory of its own."""
    return linear.wide(x) if out is None or not isinstance(linear, WritingLinear) else linear.write(x, out)


def torch_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply x [n, in] by weight.T, plus bias, to float32 or x's type; into `out` of that type if given."""
    if out is not None:
        return _write_product(x, weight, bias, out)
    if dtype is None or dtype is x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and bias is None and _WRITES_FLOAT32:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return F.linear(x, weight, bias).to(dtype)


def _write_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if out.dtype is x.dtype:
        columns = weight.t()
        return torch.mm(x, columns, out=out) if bias is None else torch.addmm(bias, x, columns, out=out)
    if x.is_cuda and bias is None and _WRITES_FLOAT32:
        return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    return out.copy_(F.linear(x, weight, bias))


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

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        return _write_product(x, self._weight, self._bias, out)
