"""The matrices of all slots for one product of all experts, at fixed device addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.adapters.factors import Factors, held_bytes
from model_server.adapters.product_slots import SlotSizes
from model_server.adapters.rows import AdapterRows


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """One adapter's matrices for a product of all experts; modules have equal shares of the outputs."""

    # [experts, modules, rank, in]; b [experts, outputs, rank]; gain, shift [experts, outputs] as in `Factors`.
    a: Tensor
    b: Tensor
    gain: Tensor | None
    shift: Tensor | None

    @property
    def nbytes(self) -> int:
        return held_bytes(self.a, self.b, self.gain, self.shift)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The shape of a product of all experts on this rank, whose outputs are equal parts of `modules`."""

    num_experts: int
    inputs: int
    outputs: int
    modules: int

    def factors(self, found: Sequence[Factors | None]) -> ExpertFactors | None:
        """Stack each expert's factors, with zeros for none; None if none has any."""
        some = [factors for factors in found if factors is not None]
        if not some:
            return None
        rank = max(e.b.shape[1] for factors in some for e in factors.expansions)
        first = some[0].a
        a = first.new_zeros(self.num_experts, self.modules, rank, self.inputs)
        b = first.new_zeros(self.num_experts, self.outputs, rank)
        changed = [self._changed(found, name) for name in ("gain", "shift")]
        height = self.outputs // self.modules
        for expert, factors in enumerate(found):
            for e in () if factors is None else factors.expansions:
                assert factors is not None
                own = e.b.shape[1]
                b[expert, e.start : e.stop, :own] = e.b
                for module in range(e.start // height, -(-e.stop // height)):
                    a[expert, module, :own] = factors.a[e.first : e.first + own]
        return ExpertFactors(a, b, *changed)

    def _changed(self, found: Sequence[Factors | None], name: str) -> Tensor | None:
        given = [None if factors is None else getattr(factors, name) for factors in found]
        if all(one is None for one in given):
            return None
        whole = torch.full((self.num_experts, self.outputs), 1.0 if name == "gain" else 0.0)
        for expert, one in enumerate(given):
            if one is not None:
                whole[expert] = one
        return whole


class ExpertSlots:
    """What the adapters in slots add to a product of all experts; zeros in empty slots."""

    def __init__(
        self, shape: ExpertShape, sizes: SlotSizes, dtype: torch.dtype, device: torch.device, *, affine: bool
    ) -> None:
        """affine: adapters may have gains and shifts."""
        self.shape = shape
        count, rank = (sizes.number, shape.num_experts), sizes.rank
        # [slots, experts, modules, rank, in]; b [slots, experts, outputs, rank]; affine [slots, experts, 2, outputs]
        # float32 multiplies, then adds.
        self.a = torch.zeros(*count, shape.modules, rank, shape.inputs, dtype=dtype, device=device)
        self.b = torch.zeros(*count, shape.outputs, rank, dtype=dtype, device=device)
        self.affine: Tensor | None = None
        if affine:
            self.affine = torch.zeros(*count, 2, shape.outputs, dtype=torch.float32, device=device)
            self.affine[:, :, 0] = 1.0

    def write(self, slot: int, factors: ExpertFactors | None) -> None:
        """Fill or clear a slot; copies of pinned memory are queued."""
        self.a[slot].zero_()  # what is left of large numbers would not be 0 times 0
        self.b[slot].zero_()
        if self.affine is not None:
            self.affine[slot, :, 0].fill_(1.0)
            self.affine[slot, :, 1].zero_()
        if factors is None:
            return
        rank = factors.b.shape[2]
        self.a[slot, :, :, :rank].copy_(factors.a, non_blocking=True)
        self.b[slot, :, :, :rank].copy_(factors.b, non_blocking=True)
        for line, changed in enumerate((factors.gain, factors.shift)):
            if changed is not None:
                assert self.affine is not None, "the sizes allow for it"
                self.affine[slot, :, line].copy_(changed, non_blocking=True)

    def add(self, rows: AdapterRows, expert: int, x: Tensor, out: Tensor) -> None:
        """Change out [n, outputs] of one expert for x [n, in]."""
        height = self.shape.outputs // self.shape.modules
        for slot, index in rows.all.groups:
            given, part = x[index], out[index]
            for module in range(self.shape.modules):
                own = slice(module * height, (module + 1) * height)
                inner = F.linear(given, self.a[slot, expert, module])
                part[:, own] += F.linear(inner, self.b[slot, expert, own])
            if self.affine is not None:
                part = part * self.affine[slot, expert, 0] + self.affine[slot, expert, 1]
            out[index] = part.to(out.dtype)
