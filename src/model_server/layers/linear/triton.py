"""Products with quantized matrices by our kernels; imported only if `kernels.availability.usable`."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.kernels.availability import has_float8
from model_server.kernels.decoding import Matrix, matrix_kind
from model_server.kernels.quantized import MOST_SPLIT_ROWS, TILES, multiply
from model_server.layers.linear.scaled import ScaledProduct, can_scale
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import E2M1, Codes
from model_server.quantization.forms.float8 import Fp8
from model_server.quantization.forms.table import TableCodes

Decodable = Codes | TableCodes | Fp8

# Columns of a tile that have one scale are a power of 2: fewer would be more scales than numbers.
_SMALLEST_GROUP = 8


class TritonQuantizedLinear:
    """A matrix kept as stored and decoded while it is multiplied."""

    __slots__ = ("_bias", "_many_rows", "_matrix", "_num_processors", "_order")

    def __init__(self, form: Decodable, bias: Tensor | None, dtype: torch.dtype) -> None:
        """dtype: of activations, bfloat16 or float16."""
        self._matrix = kernel_matrix(form)
        self._bias = bias
        self._order = form.order.columns if isinstance(form, Codes) and form.order is not None else None
        device = self._matrix.numbers.device
        self._num_processors = 1
        self._many_rows: ScaledProduct | None = None
        if device.type == "cuda":
            if isinstance(form, Fp8) and can_scale(form, dtype, torch.cuda.get_device_capability(device)):
                self._many_rows = ScaledProduct(form, bias)
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._compile(form.shape[1], dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        return self._product(x, out.dtype, out)

    def _product(self, x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, self._matrix.width, dtype=dtype) if out is None else out
        if self._many_rows is not None and x.shape[0] > MOST_SPLIT_ROWS:
            return self._many_rows(x, dtype, out)
        if self._order is not None:
            x = x.index_select(1, self._order)
        return multiply(x, self._matrix, self._bias, dtype, self._num_processors, out=out)

    def _compile(self, num_inputs: int, dtype: torch.dtype) -> None:
        """Compile the tiles of every number of rows ahead of the first such batch."""
        for tiles in TILES:
            self(torch.zeros(tiles.rows, num_inputs, dtype=dtype, device=self._matrix.numbers.device))


def decoding_linear(form: Form, bias: Tensor | None, dtype: torch.dtype) -> TritonQuantizedLinear | None:
    """Return the product with `form`, if the kernels take it."""
    return TritonQuantizedLinear(form, bias, dtype) if can_decode(form) else None


def can_decode(form: Form) -> TypeGuard[Decodable]:
    """Whether the kernels take `form`."""
    if not isinstance(form, Decodable) or (isinstance(form, TableCodes) and not form.is_packed):
        return False
    if isinstance(form, Codes) and form.levels is not None and not (form.levels == E2M1 and form.is_packed):
        return False
    group = form.block[1] if isinstance(form, Fp8) else form.group
    return form.scales.shape[1] == 1 or group % _SMALLEST_GROUP == 0


def kernel_matrix(form: Decodable, *, small_scales: bool = True) -> Matrix:
    """Return `form` for kernels: scales of adjacent rows side by side, numbers shared.

    Args:
        small_scales: Of 4-bit floats, in 8 bits where kernels can read them.
    """
    scales = form.scales.t().contiguous()
    if isinstance(form, Codes) and form.levels is not None:
        return _float4(form, 2 * scales, small=small_scales)
    if isinstance(form, Codes):
        kind, numbers = matrix_kind(form.codes.contiguous(), form.num_columns, has_float8=False)
        return Matrix(kind, numbers, scales, form.zeros.t().contiguous(), form.group, 1, form.num_columns)
    if isinstance(form, TableCodes):
        return Matrix("table4", form.codes.contiguous(), scales, form.table, form.group, 1, form.num_columns)
    kind, numbers = matrix_kind(form.weight.contiguous(), form.shape[1], has_float8=has_float8(form.weight.device))
    height, width = form.block
    return Matrix(kind, numbers, scales, None, width, height, form.shape[1])


def _float4(form: Codes, scales: Tensor, *, small: bool) -> Matrix:
    """Make a matrix of floats with scales [groups, out], small ones as powers of two or e4m3."""
    matrix = Matrix("float4", form.codes.contiguous(), scales, None, form.group, 1, form.num_columns)
    if matrix.num_groups == 1 or not small:
        return matrix
    parts, exponents = torch.frexp(scales)
    if bool(((parts == 0.5) & (exponents >= -126)).all()):
        return replace(matrix, kind="mxfp4", scales=_by_fours((exponents + 126).to(torch.uint8)), height=4)
    if form.factors is None:
        return matrix
    factors = 2 * form.factors
    bits = (scales / factors).to(torch.float8_e4m3fn)
    if not torch.allclose(bits.float() * factors, scales, rtol=1e-6, atol=0):
        return matrix
    return replace(matrix, kind="nvfp4", scales=_by_fours(bits.view(torch.uint8)), zeros=factors, height=4)


def _by_fours(scales: Tensor) -> Tensor:
    """Pack bytes [groups, out] into int32 [groups, out / 4], the first lowest."""
    return F.pad(scales, (0, -scales.shape[1] % 4)).view(torch.int32)
