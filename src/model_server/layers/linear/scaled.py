"""Products of 8-bit floats by torch, for many rows on GPUs with instructions for it.

Only for checkpoints made for 8-bit activations: each token gets a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.quantization.forms.float8 import Fp8, quantize_inputs

# Compute capabilities from which on the operator takes one scale for a matrix, and a scale for each row.
_WITH_ONE_SCALE = (8, 9)
_WITH_SCALES_OF_ROWS = (9, 0)
# Numbers of rows and columns must be multiples of it.
_UNIT = 16


class ScaledProduct:
    """A product with `form`; see `can_scale`."""

    __slots__ = ("_bias", "_by_rows", "_one", "_scales", "_weight")

    def __init__(self, form: Fp8, bias: Tensor | None) -> None:
        self._by_rows = form.scales.numel() > 1
        self._weight = form.weight.contiguous().t()
        self._scales = form.scales_of_rows().reshape(1, -1) if self._by_rows else form.scales.reshape(())
        self._one = torch.ones((), device=form.weight.device)
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Multiply x [n, in] to `dtype`, into `out` if given; rows with own scales are rounded to bfloat16 first."""
        inputs, scales = quantize_inputs(x)
        if self._by_rows:
            product = torch._scaled_mm(inputs, self._weight, scales, self._scales, out_dtype=torch.bfloat16)
        else:
            product = torch._scaled_mm(inputs, self._weight, self._one, self._scales, out_dtype=torch.float32) * scales
        product = product if self._bias is None else product + self._bias
        return product.to(dtype) if out is None else out.copy_(product)


def can_scale(form: object, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether torch multiplies `dtype` by `form` at this capability, and may."""
    if not isinstance(form, Fp8) or not form.float8_inputs or any(size % _UNIT for size in form.shape):
        return False
    if form.scales.numel() == 1:
        return capability >= _WITH_ONE_SCALE
    return form.scales.shape[1] == 1 and dtype == torch.bfloat16 and capability >= _WITH_SCALES_OF_ROWS
