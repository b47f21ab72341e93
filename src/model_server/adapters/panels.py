"""The matrices of adapters as `cpp/source/adapters.hpp` reads them: Bs in panels of outputs, beside each other's."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from torch import Tensor

from model_server.adapters.factors import Expansion, Factors
from model_server.cpp.library import TYPES, prepared
from model_server.cpp.structs import AdapterExpansionStruct, AdapterFactorsStruct


class AdapterPanels:
    """What the adapters of a model, by their numbers, add to one product. For what `cpp.library.usable` serves.

    structs: one for each number; it holds the memory that they point to.
    """

    def __init__(self, factors: Mapping[int, Factors], number: int) -> None:
        """number: of all adapters of the model, also those that add nothing to this product."""
        self.structs = (AdapterFactorsStruct * number)()
        self._kept: list[object] = []
        self._function = prepared().cpp_adapt
        for place, of_adapter in factors.items():
            self.structs[place] = self._struct(of_adapter)

    def add(self, numbers: Tensor, x: Tensor, out: Tensor) -> None:
        """out [..., outputs] += what the adapters of the rows give for x [..., inputs].

        numbers: int64, of each row; below 0: none. out: contiguous, of the type of x or float32.
        """
        inputs, outputs = x.shape[-1], out.shape[-1]
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
        if len(numbers) != len(rows) or not out.is_contiguous():
            raise RuntimeError(f"{len(numbers)} rows have adapters or none; the product has {len(rows)}")
        self._function(
            TYPES[x.dtype],
            self.structs,
            numbers.data_ptr(),
            rows.data_ptr(),
            rows.stride(0),
            inputs,
            len(rows),
            out.data_ptr(),
            outputs,
            out.dtype != x.dtype,
        )

    def _struct(self, factors: Factors) -> AdapterFactorsStruct:
        panel = prepared().cpp_panel()
        packed = [_panels(e, panel) for e in factors.expansions]
        expansions = (AdapterExpansionStruct * len(packed))()
        for i, (e, b) in enumerate(zip(factors.expansions, packed, strict=True)):
            expansions[i] = AdapterExpansionStruct(e.start // panel, len(b), e.first, b.shape[1], b.data_ptr())
        self._kept += [factors, packed, expansions]
        return AdapterFactorsStruct(
            factors.a.data_ptr(),
            len(factors.a),
            len(packed),
            ctypes.cast(expansions, ctypes.POINTER(AdapterExpansionStruct)),
            None if factors.gain is None else factors.gain.data_ptr(),
            None if factors.shift is None else factors.shift.data_ptr(),
        )


def _panels(expansion: Expansion, panel: int) -> Tensor:
    """B as [panels, rank, panel], from the panel in which its first output is; 0 for outputs that are not its own."""
    first = expansion.start // panel
    last = -(-expansion.stop // panel)
    filled = expansion.b.new_zeros((last - first) * panel, expansion.b.shape[1])
    filled[expansion.start - first * panel : expansion.stop - first * panel] = expansion.b
    return filled.view(last - first, panel, -1).transpose(1, 2).contiguous()
