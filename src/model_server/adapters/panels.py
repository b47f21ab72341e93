"""The matrices of adapters as `cpp/source/adapters.hpp` reads them: Bs packed from a panel on."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from model_server.adapters.factors import Expansion, Factors
from model_server.cpp.library import TYPES, prepared
from model_server.cpp.structs import AdapterExpansionStruct, AdapterFactorsStruct
from model_server.memory.huge_pages import Arena


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """One adapter's factors, and the memory that the struct points to."""

    struct: AdapterFactorsStruct
    kept: tuple[object, ...]
    nbytes: int


class AdapterPanels:
    """What the adapters of a model, by number, add to one product on `cpp.library.usable` devices."""

    def __init__(self, number: int) -> None:
        """Take the most adapters at once."""
        self._number = number
        self._packed: dict[int, PackedFactors] = {}
        self._function = prepared().cpp_adapt

    @cached_property
    def structs(self) -> ctypes.Array[AdapterFactorsStruct]:
        # One for each number, at a fixed address.
        return (AdapterFactorsStruct * self._number)()

    def put(self, number: int, packed: PackedFactors) -> None:
        self.structs[number] = packed.struct  # first: a step of other rows must not make them at the same time
        self._packed[number] = packed

    def remove(self, number: int) -> None:
        if self._packed.pop(number, None) is not None:
            self.structs[number] = AdapterFactorsStruct()

    def add(self, numbers: Tensor, x: Tensor, out: Tensor) -> None:
        """Add what adapters give for x [..., inputs] to out [..., outputs].

        Args:
            numbers: int64, of each row; below 0: none.
            out: Contiguous, of the type of x or float32.
        """
        if not self._packed:
            return
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


def packed(factors: Factors, memory: Arena) -> PackedFactors:
    """Pack `factors` into `memory`: a step reads an adapter's data side by side."""
    panel = prepared().cpp_panel()
    a = memory.zeros(*factors.a.shape, dtype=factors.a.dtype).copy_(factors.a)
    bs = [_panels(e, panel, memory) for e in factors.expansions]
    expansions = (AdapterExpansionStruct * len(bs))()
    for i, (e, b) in enumerate(zip(factors.expansions, bs, strict=True)):
        expansions[i] = AdapterExpansionStruct(e.start // panel, len(b) // panel, e.first, b.shape[1], b.data_ptr())
    struct = AdapterFactorsStruct(
        a.data_ptr(),
        len(a),
        len(bs),
        ctypes.cast(expansions, ctypes.POINTER(AdapterExpansionStruct)),
        None if factors.gain is None else factors.gain.data_ptr(),
        None if factors.shift is None else factors.shift.data_ptr(),
    )
    tensors = [t for t in (a, factors.gain, factors.shift, *bs) if t is not None]
    return PackedFactors(struct, (*tensors, expansions), sum(t.nbytes for t in tensors))


def _panels(expansion: Expansion, panel: int, memory: Arena) -> Tensor:
    """Pack B as [panels * panel, rank in pairs], from its first output's panel, with 0 for others."""
    first = expansion.start // panel
    last = -(-expansion.stop // panel)
    rank = expansion.b.shape[1]
    filled = expansion.b.new_zeros((last - first) * panel, rank + rank % 2)
    filled[expansion.start - first * panel : expansion.stop - first * panel, :rank] = expansion.b
    out = memory.zeros(*filled.shape, dtype=filled.dtype)
    prepared().cpp_pack(TYPES[filled.dtype], filled.data_ptr(), out.data_ptr(), *filled.shape)
    return out
