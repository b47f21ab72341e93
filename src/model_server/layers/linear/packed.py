"""Matrices packed for `cpp/source/matrix.hpp`, fast for few and many rows."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.cpp.library import TYPES, library, prepared
from model_server.memory import huge_pages


class PackedLinear:
    """A product with panels; float32 or bfloat16, `inputs` even."""

    __slots__ = ("_address", "_bias_address", "_function", "_type", "bias", "inputs", "outputs", "panels")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, arena: huge_pages.Arena | None = huge_pages.WEIGHTS
    ) -> None:
        self.outputs, self.inputs = weight.shape
        self._type = TYPES[weight.dtype]
        operators = prepared()
        self.panels = _packed(weight.unsqueeze(0), arena)[0]
        self.bias = bias
        self._address = self.panels.data_ptr()
        self._bias_address = None if bias is None else bias.data_ptr()
        self._function = operators.cpp_linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, None)

    def wide(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Multiply x [..., inputs] to the same type, or to unrounded float32; checks x, since the operator does not."""
        if x.shape[-1] != self.inputs or x.dtype != self.panels.dtype:
            raise RuntimeError(
                f"a product of {list(x.shape)} {x.dtype} with a matrix of {self.inputs} inputs, {self.panels.dtype}"
            )
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.inputs).contiguous()
        out = x.new_empty(*x.shape[:-1], self.outputs, dtype=dtype)
        self._function(
            self._type,
            self._address,
            self._bias_address,
            self.outputs,
            self.inputs,
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            out.data_ptr(),
            out.dtype != self.panels.dtype,
        )
        return out


class HeadPanels:
    """Products with a matrix for each head [heads, outputs, inputs], all in one call; types as above."""

    __slots__ = ("_address", "_function", "_type", "inputs", "outputs", "panels")

    def __init__(self, weight: Tensor, arena: huge_pages.Arena = huge_pages.WEIGHTS) -> None:
        _, self.outputs, self.inputs = weight.shape
        self._type = TYPES[weight.dtype]
        self.panels = _packed(weight, arena)
        self._address = self.panels.data_ptr()
        self._function = prepared().cpp_head_linear

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write x [n, heads, inputs] @ weight.T into out [n, heads, outputs]; checks, since the operator does not."""
        heads = len(self.panels)
        if x.shape[1:] != (heads, self.inputs) or out.shape != (len(x), heads, self.outputs):
            raise RuntimeError(f"a product of {list(x.shape)} to {list(out.shape)} with {list(self.panels.shape)}")
        if {x.dtype, out.dtype} != {self.panels.dtype} or x.stride(2) != 1 or out.stride(2) != 1:
            raise RuntimeError(f"a product of {x.dtype} to {out.dtype} with matrices of {self.panels.dtype}")
        self._function(
            self._type,
            self._address,
            heads,
            self.outputs,
            self.inputs,
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            len(x),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
        )


def _packed(matrices: Tensor, arena: huge_pages.Arena | None) -> Tensor:
    """Pack matrices [n, outputs, inputs] into panels [n, outputs filled up, inputs]; without an arena, for a while."""
    operators = prepared()
    number, outputs, inputs = matrices.shape
    panel = operators.cpp_panel()
    zeros = torch.zeros if arena is None else arena.zeros
    panels = zeros(number, (outputs + panel - 1) // panel * panel, inputs, dtype=matrices.dtype)
    for source, packed in zip(matrices.contiguous(), panels, strict=True):
        operators.cpp_pack(TYPES[matrices.dtype], source.data_ptr(), packed.data_ptr(), outputs, inputs)
    return panels


def whole_panels(size: int) -> bool:
    """Whether `size` outputs fill their panels."""
    operators = library()
    return operators is not None and size % operators.cpp_panel() == 0
