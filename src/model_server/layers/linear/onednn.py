"""Matrices in oneDNN's layout, for CPUs without our operators: few rows are 1.3 to 3 times faster.

The operators are private to torch and change: `weight_packer` tries them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Packer = Callable[[Tensor], Tensor]

# Measured on two cores with AVX-512: smaller matrices gain nothing by packing, and one row in float32 is multiplied
# faster by the unpacked matrix up to the second size (oneDNN's call alone costs 10 to 15 us).
SMALLEST_PACKED = 100_000
LARGEST_UNPACKED_ROW = 300_000

# The number of rows that matrices are packed for: within 5 % of the best layout at every number.
PACKED_ROWS = 32


class OneDnnLinear:
    """A packed matrix, and the plain one if faster for a single row."""

    __slots__ = ("_bias", "_packed", "_unpacked")

    def __init__(self, weight: Tensor, bias: Tensor | None, packer: Packer) -> None:
        small = weight.dtype == torch.float32 and weight.numel() <= LARGEST_UNPACKED_ROW
        self._packed = packer(weight)
        self._unpacked = weight if small else None
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._unpacked is not None and x.shape[0] == 1:
            return F.linear(x, self._unpacked, self._bias)
        return _product(x, self._packed, self._bias)

    def wide(self, x: Tensor) -> Tensor:
        return self(x).float()


@cache
def weight_packer(device: torch.device, dtype: torch.dtype) -> Packer | None:
    """Return what packs a matrix [out, in] for oneDNN, tried against a product; None if this torch cannot."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    weight, x = torch.randn(64, 32).to(dtype), torch.randn(4, 32).to(dtype)
    try:
        product = _product(x, _pack(weight), None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    # bfloat16 keeps 8 bits; sums of 32 products of order 1.
    return _pack if torch.allclose(product.float(), x.float() @ weight.float().T, atol=0.3, rtol=0.03) else None


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return packed


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
