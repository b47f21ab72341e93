"""Matrix products. A rank holds some rows of a matrix, or some columns: then its product is a summand of the whole.

On a CPU a matrix is packed once, which makes products of few rows 1.3 to 3 times faster: into the panels of our native
operators, or where these cannot be had into oneDNN's own layout. The operators for the latter are private to torch:
`device.weight_packer` looks for them, and without them all is as before.
On a GPU products of few rows go by what was measured to be quickest (`small_products`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.cpp.matrix import packed
from model_server.device import weight_packer
from model_server.layers.linear.decode_gemm import small_product

# Measured on two cores with AVX-512: smaller matrices gain nothing by packing, and one row in float32 is multiplied
# faster by the unpacked matrix up to the second size (oneDNN's call alone costs 10 to 15 us).
SMALLEST_PACKED = 100_000
LARGEST_UNPACKED_ROW = 300_000


class Linear:
    """`x @ weight.T + bias`; weight [out, in], bias [out] or None; x [n, in]."""

    __slots__ = ("_bias", "_packed", "_small", "_weight", "native")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.native = packed(weight, bias)  # None: the native operators do not serve it
        if self.native is not None:
            return
        size = weight.numel()
        packer = weight_packer(weight.device, weight.dtype) if size >= SMALLEST_PACKED else None
        self._bias = bias
        self._small = small_product(weight)
        self._packed = None if packer is None else packer(weight)
        small = weight.dtype == torch.float32 and size <= LARGEST_UNPACKED_ROW
        self._weight = weight if self._packed is None or small else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.native is not None:
            return self.native(x)
        if self._small is not None:
            return self._small(x, self._weight, self._bias)  # type: ignore[arg-type]  # packed on CPUs alone
        if self._packed is None or (self._weight is not None and x.shape[0] == 1):
            return F.linear(x, self._weight, self._bias)  # type: ignore[arg-type]  # one of the two is there
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]

    def wide(self, x: Tensor) -> Tensor:
        """The product in float32, not rounded to the weight's type first where that can be avoided."""
        return self(x).float() if self.native is None else self.native(x, torch.float32)
