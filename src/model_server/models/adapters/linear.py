"""Products and an embedding that LoRA adapters change for the rows that have one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.adapters.expert_slots import ExpertFactors
from model_server.adapters.factors import EmbeddingFactors, Factors, HeadRows
from model_server.adapters.panels import AdapterPanels, PackedFactors, packed
from model_server.adapters.rows import CurrentRows
from model_server.cpp.library import usable
from model_server.layers.embedding import Embedding
from model_server.layers.linear.linear import Linear, wide_into
from model_server.memory.huge_pages import Arena


@dataclass(frozen=True, slots=True)
class Addition:
    """What one adapter changes of one product."""

    # Packed where the C++ operators serve; of all experts where these are in slots.
    factors: Factors | PackedFactors | ExpertFactors | None
    rows: HeadRows | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.factors, self.rows) if part is not None)


class Adapted(ABC):
    """A `Linear` with adapters; rows without one are `base`'s, bit for bit."""

    __slots__ = ()
    base: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.adapt(x, self.base(x))

    def wide(self, x: Tensor) -> Tensor:
        return self.adapt(x, self.base.wide(x))

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        return self.adapt(x, wide_into(self.base, x, out))

    @abstractmethod
    def adapt(self, x: Tensor, out: Tensor) -> Tensor:
        """Change out [n, outputs], the base model's for x [n, in]."""


class AdaptedLinear(Adapted):
    """A product that uses adapters where they were loaded."""

    __slots__ = ("_current", "_factors", "_rows", "base", "panels")

    def __init__(
        self, base: Linear, current: CurrentRows, number: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Wrap `base`.

        Args:
            current: The rows of the running step.
            number: The most adapters at once.
        """
        self.base = base
        self.panels = AdapterPanels(number) if usable(device, dtype) else None
        self._factors: dict[int, Factors] = {}
        self._rows: dict[int, HeadRows] = {}
        self._current = current

    def addition(self, factors: Factors | None, rows: HeadRows | None, memory: Arena) -> Addition | None:
        """Pack what `put` takes into the adapter's `memory`; None: no change."""
        if factors is None and rows is None:
            return None
        has_panels = self.panels is not None and factors is not None
        return Addition(packed(factors, memory) if has_panels and factors is not None else factors, rows)

    def put(self, number: int, addition: Addition) -> None:
        if isinstance(addition.factors, PackedFactors):
            assert self.panels is not None
            self.panels.put(number, addition.factors)
        elif isinstance(addition.factors, Factors):
            self._factors[number] = addition.factors
        if addition.rows is not None:
            self._rows[number] = addition.rows

    def remove(self, number: int) -> None:
        if self.panels is not None:
            self.panels.remove(number)
        self._factors.pop(number, None)
        self._rows.pop(number, None)

    def adapt(self, x: Tensor, out: Tensor) -> Tensor:
        rows = self._current.rows
        if rows is None:
            return out
        if self._rows:
            for number, index in rows.among(x.shape[0]).groups:
                if number in self._rows:
                    self._rows[number].replace(x, out, index)
        if self.panels is not None:
            self.panels.add(rows.among(out.numel() // out.shape[-1]).numbers, x, out)
            return out
        rows.among(x.shape[0]).change(x, out, lambda number, *given: self._factors[number].add(*given), self._factors)
        return out


class AdaptedEmbedding:
    """An embedding of which adapters change rows."""

    __slots__ = ("_base", "_current", "_factors")

    def __init__(self, base: Embedding, current: CurrentRows) -> None:
        self._base = base
        self._factors: dict[int, EmbeddingFactors] = {}
        self._current = current

    def put(self, number: int, factors: EmbeddingFactors) -> None:
        self._factors[number] = factors

    def remove(self, number: int) -> None:
        self._factors.pop(number, None)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.adapt(ids, self._base(ids))

    def adapt(self, ids: Tensor, out: Tensor) -> Tensor:
        """Change out [n, width], the base model's rows of ids [n]."""
        rows = self._current.rows
        for number, index in () if rows is None else rows.all.groups:
            if number in self._factors:
                out[index] = self._factors[number].of(ids[index], out[index])
        return out


def base_of(linear: Linear) -> Linear:
    """Return the base model's product of a layer."""
    return linear.base if isinstance(linear, AdaptedLinear) else linear
