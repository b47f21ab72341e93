"""A matrix packed for `source/matrix.hpp`: one layout that is multiplied fast by one row as well as by many."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.cpp.library import TYPES, library, prepared, usable
from model_server.memory import huge_pages


class PackedMatrix:
    """`x @ weight.T + bias` with a weight [outputs, inputs] in panels; float32 or bfloat16."""

    __slots__ = ("_address", "_bias_address", "_function", "_type", "bias", "inputs", "outputs", "panels")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self._type = TYPES[weight.dtype]
        native = prepared()
        panel = native.native_panel()
        self.panels = huge_pages.zeros((self.outputs + panel - 1) // panel * panel, self.inputs, dtype=weight.dtype)
        self.bias = bias
        self._address = self.panels.data_ptr()
        self._bias_address = None if bias is None else bias.data_ptr()
        self._function = native.native_linear
        source = weight.contiguous()
        native.native_pack(self._type, source.data_ptr(), self._address, self.outputs, self.inputs)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [..., inputs] of the weight's type -> [..., outputs], in `dtype`: the same type, or float32.

        In float32 the sums are given as they are, not rounded to bfloat16 first. Raises RuntimeError for another x, as
        torch's own product does: what is behind these addresses nobody checks.
        """
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


def packed(weight: Tensor, bias: Tensor | None) -> PackedMatrix | None:
    """The matrix packed, or None where this machine or its type is not served natively."""
    if weight.dim() != 2 or not usable(weight.device, weight.dtype) or weight.shape[1] % 2:
        return None
    return PackedMatrix(weight, bias)


def whole_panels(size: int) -> bool:
    """Whether `size` outputs fill their panels."""
    native = library()
    return native is not None and size % native.native_panel() == 0
