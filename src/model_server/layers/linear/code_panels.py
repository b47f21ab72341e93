"""Matrices of codes or small floats, packed for `cpp/source/codes.hpp` and `float8_product.hpp`."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from model_server.cpp.library import TYPES, prepared
from model_server.cpp.structs import CodeShapeStruct
from model_server.memory import huge_pages
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes
from model_server.quantization.forms.float8 import Fp8
from model_server.quantization.forms.offset_codes import OffsetCodes
from model_server.quantization.forms.table import TableCodes

Packable = Codes | OffsetCodes | Fp8 | TableCodes

# Inputs that share an activation's bytes in the panels: a group must not end between them, except the last.
_STEP = 8
# Smaller groups would spend more time on their scales than on their codes.
_SMALLEST_GROUP = 16
# Inputs whose upper bits are stored together, of codes of 5 and 6 bits.
_UPPER = {5: 32, 6: 16}


class CodeLinear:
    """A product with `form`, for float32 or bfloat16 activations; see `can_pack`."""

    # Beside whole numbers (`Codes`) activations become whole numbers too, of 14 bits (bfloat16) or 21 bits (float32),
    # with a scale for at most 256 of them: so far results differ from those of the decoded matrix. Numbers of a table
    # are rounded to `dtype`.
    __slots__ = ("_function", "_kept", "_type", "bias", "dtype", "inputs", "outputs", "panels", "struct")

    def __init__(
        self,
        form: Packable,
        bias: Tensor | None,
        dtype: torch.dtype,
        arena: huge_pages.Arena = huge_pages.WEIGHTS,
    ) -> None:
        self.outputs, self.inputs = form.shape
        self.dtype = dtype
        self.bias = bias
        self._type = TYPES[dtype]
        operators = prepared()
        self._function = operators.cpp_code_linear
        self.struct, self._kept = _struct_of(form)
        self.struct.bias = None if bias is None else bias.data_ptr()
        if isinstance(form, Codes | OffsetCodes):
            stored, offsets = (form.codes, form.offsets.contiguous()) if isinstance(form, OffsetCodes) else (form, None)
            numbers = stored.scales.float().contiguous()
            at_offsets = None if offsets is None else offsets.data_ptr()
            self.struct.numbers = operators.cpp_number_kind(self.struct, numbers.data_ptr(), at_offsets)
            codes, zeros = stored.codes.contiguous(), stored.zeros.contiguous()
            at = self._allocate(arena)
            operators.cpp_pack_codes(
                self.struct, codes.data_ptr(), numbers.data_ptr(), zeros.data_ptr(), at_offsets, at
            )
        else:
            weight = (form.weight if isinstance(form, Fp8) else form.codes).contiguous()
            scales = (form.scales_of_rows() if isinstance(form, Fp8) else form.scales).contiguous()
            at = self._allocate(arena)
            operators.cpp_pack_float8(self._type, self.struct, weight.data_ptr(), scales.data_ptr(), at)

    def _allocate(self, arena: huge_pages.Arena) -> int:
        """The address of the panels."""
        self.panels = arena.zeros(prepared().cpp_code_bytes(self.struct), dtype=torch.uint8)
        self.struct.panels = self.panels.data_ptr()
        return self.panels.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.dtype)

    def wide(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply x [..., inputs]; checks x, since the operator does not."""
        if x.shape[-1] != self.inputs or x.dtype != self.dtype:
            raise RuntimeError(
                f"a product of {list(x.shape)} {x.dtype} with a matrix of {self.inputs} inputs for {self.dtype}"
            )
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.inputs).contiguous()
        out = x.new_empty(*x.shape[:-1], self.outputs, dtype=dtype)
        self._function(
            self._type, self.struct, rows.data_ptr(), rows.stride(0), rows.shape[0], out.data_ptr(), dtype != self.dtype
        )
        return out


def can_pack(form: Form) -> TypeGuard[Packable]:
    if isinstance(form, TableCodes):
        return form.is_packed and (form.scales.shape[1] == 1 or form.group % 2 == 0)
    if isinstance(form, OffsetCodes):
        return can_pack(form.codes) and form.codes.order is None and not bool(form.codes.zeros.any())
    if isinstance(form, Fp8):
        return form.shape[1] % 2 == 0 and (form.scales.shape[1] == 1 or form.block[1] % 2 == 0)
    if not isinstance(form, Codes) or (form.levels is not None and not form.is_packed):
        return False
    return form.scales.shape[1] == 1 or (form.group % _STEP == 0 and form.group >= _SMALLEST_GROUP)


def _struct_of(form: Packable) -> tuple[CodeShapeStruct, tuple[Tensor | None, ...]]:
    """And the tensors whose addresses it holds."""
    if isinstance(form, Codes):
        return _struct_of_codes(form)
    if isinstance(form, OffsetCodes):
        struct, kept = _struct_of_codes(form.codes)
        struct.has_offsets = True
        return struct, kept
    if isinstance(form, Fp8):
        return _struct_of_floats(form.shape, form.scales, form.block[1], bits=8), ()
    table = form.table.contiguous()
    struct = _struct_of_floats(form.shape, form.scales, form.group, bits=4)
    struct.table = table.data_ptr()
    return struct, (table,)


def _struct_of_codes(form: Codes) -> tuple[CodeShapeStruct, tuple[Tensor | None, Tensor | None]]:
    """And the tensors whose addresses it holds."""
    order = None if form.order is None else form.order.columns.contiguous()
    levels = None if form.levels is None else torch.tensor(form.levels, dtype=torch.uint8)
    zero = int(form.zeros[0, 0]) if form.zeros.numel() else 0
    struct = CodeShapeStruct(
        order=None if order is None else order.data_ptr(),
        outputs=form.shape[0],
        inputs=form.shape[1],
        columns=form.num_columns,
        bits=_bits(form),
        group=min(form.group, form.num_columns),
        zero=zero if bool((form.zeros == zero).all()) else -1,
        levels=None if levels is None else levels.data_ptr(),
    )
    return struct, (order, levels)


def _bits(form: Codes) -> int:
    """Return a code's bits in the panels: 5 and 6 only for groups of whole runs of `_UPPER` inputs."""
    if form.is_packed:
        return 4
    group = min(form.group, form.num_columns)
    fitting = [bits for bits, inputs in _UPPER.items() if not (group % inputs or form.num_columns % inputs)]
    return min((bits for bits in fitting if form.bits <= bits), default=8)


def _struct_of_floats(shape: tuple[int, int], scales: Tensor, group: int, bits: int) -> CodeShapeStruct:
    outputs, inputs = shape
    group = inputs if scales.shape[1] == 1 else min(group, inputs)
    return CodeShapeStruct(outputs=outputs, inputs=inputs, columns=inputs, bits=bits, group=group, is_float8=True)
