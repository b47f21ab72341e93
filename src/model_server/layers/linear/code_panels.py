"""A matrix of codes, packed for `cpp/source/codes.hpp`: multiplied as whole numbers, without decoding it."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.cpp.library import TYPES, prepared
from model_server.cpp.structs import CodeShapeStruct
from model_server.memory import huge_pages
from model_server.quantization.codes import Codes

# Inputs that share an activation's bytes in the panels: a group must not end between them, except the last.
_STEP = 8
# Smaller groups would spend more time on their scales than on their codes.
_SMALLEST_GROUP = 16


class CodeLinear:
    """A product with `form`, for activations of `dtype`, float32 or bfloat16; for what `can_pack` takes.

    Activations become whole numbers of 14 bits (bfloat16) or 21 bits (float32) with a scale for each 128 of them: that
    is what the result differs by from a product with the decoded matrix.
    """

    __slots__ = ("_function", "_order", "_type", "bias", "dtype", "inputs", "outputs", "panels", "struct")

    def __init__(
        self, form: Codes, bias: Tensor | None, dtype: torch.dtype, arena: huge_pages.Arena = huge_pages.WEIGHTS
    ) -> None:
        self.outputs, self.inputs = form.shape
        self.dtype = dtype
        self.bias = bias
        self._type = TYPES[dtype]
        operators = prepared()
        self._function = operators.cpp_code_linear
        self._order = None if form.order is None else form.order.columns.contiguous()
        zero = int(form.zeros[0, 0]) if form.zeros.numel() else 0
        struct = CodeShapeStruct(
            bias=None if bias is None else bias.data_ptr(),
            order=None if self._order is None else self._order.data_ptr(),
            outputs=self.outputs,
            inputs=self.inputs,
            columns=form.num_columns,
            bits=4 if form.is_packed else 8,
            group=min(form.group, form.num_columns),
            zero=zero if bool((form.zeros == zero).all()) else -1,
        )
        self.panels = arena.zeros(operators.cpp_code_bytes(struct), dtype=torch.uint8)
        struct.panels = self.panels.data_ptr()
        self.struct = struct
        codes, scales, zeros = form.codes.contiguous(), form.scales.float().contiguous(), form.zeros.contiguous()
        operators.cpp_pack_codes(struct, codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), self.panels.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.dtype)

    def wide(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [..., inputs] -> [..., outputs]. Raises RuntimeError for another x: the operator checks nothing."""
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


def can_pack(form: Codes) -> bool:
    """Whether the operators multiply matrices of this kind."""
    return form.scales.shape[1] == 1 or (form.group % _STEP == 0 and form.group >= _SMALLEST_GROUP)
