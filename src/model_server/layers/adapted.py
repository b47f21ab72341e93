"""Products and an embedding with LoRA adapters: rows of a batch that have one get what it makes of the base model's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.adapters.factors import EmbeddingFactors, Factors, HeadRows
from model_server.adapters.panels import AdapterPanels, PackedFactors, packed
from model_server.adapters.rows import CurrentRows, RowIndex
from model_server.adapters.slots.experts import ExpertFactors
from model_server.cpp.library import usable
from model_server.layers.embedding import Embedding
from model_server.layers.linear.linear import Linear
from model_server.memory.huge_pages import Arena


@dataclass(frozen=True, slots=True)
class Addition:
    """What one adapter changes of one product. factors: packed for the C++ operators where these serve; of all experts
    together where these are in slots."""

    factors: Factors | PackedFactors | ExpertFactors | None
    rows: HeadRows | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.factors, self.rows) if part is not None)


class AdaptedLinear:
    """A `Linear`: the base model's product, and what adapters make of it for the rows that have one.

    Rows without an adapter are what `base` gives, bit for bit. panels: where the C++ operators serve.
    """

    __slots__ = ("_current", "_factors", "_rows", "base", "panels")

    def __init__(
        self, base: Linear, current: CurrentRows, number: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """current: whose rows are read at each call. number: of all adapters that the model may have at once."""
        self.base = base
        self.panels = AdapterPanels(number) if usable(device, dtype) else None
        self._factors: dict[int, Factors] = {}
        self._rows: dict[int, HeadRows] = {}
        self._current = current

    def addition(self, factors: Factors | None, rows: HeadRows | None, memory: Arena) -> Addition | None:
        """As `put` takes it; None: it would change nothing. memory: of the adapter, for what is packed."""
        if factors is None and rows is None:
            return None
        has_panels = self.panels is not None and factors is not None
        return Addition(packed(factors, memory) if has_panels and factors is not None else factors, rows)

    def put(self, number: int, addition: Addition) -> None:
        """From now on the adapter of that number changes this. No row of a running step may have the number."""
        if isinstance(addition.factors, PackedFactors):
            assert self.panels is not None
            self.panels.put(number, addition.factors)
        elif isinstance(addition.factors, Factors):
            self._factors[number] = addition.factors
        if addition.rows is not None:
            self._rows[number] = addition.rows

    def remove(self, number: int) -> None:
        """The adapter of that number changes nothing more. No row of a running step may have the number."""
        if self.panels is not None:
            self.panels.remove(number)
        self._factors.pop(number, None)
        self._rows.pop(number, None)

    def __call__(self, x: Tensor) -> Tensor:
        return self.adapt(x, self.base(x))

    def wide(self, x: Tensor) -> Tensor:
        return self.adapt(x, self.base.wide(x))

    def adapt(self, x: Tensor, out: Tensor) -> Tensor:
        """out [n, outputs], which is changed: what the base model gives for x [n, in] -> what adapters make of it."""
        rows = self._current.rows
        if rows is None:
            return out
        if self._rows:
            for number, index in rows.among(x.shape[0]):
                if number in self._rows:
                    self._rows[number].replace(x, out, index)
        if self.panels is not None:
            self.panels.add(rows.numbers_among(out.numel() // out.shape[-1]), x, out)
            return out
        for number, index in rows.among(x.shape[0]):
            factors = self._factors.get(number)
            if factors is not None:
                _add(factors, x, out, index)
        return out


class AdaptedEmbedding:
    """An embedding of which adapters change rows."""

    __slots__ = ("_base", "_current", "_factors")

    def __init__(self, base: Embedding, current: CurrentRows) -> None:
        """current: whose rows are read at each call."""
        self._base = base
        self._factors: dict[int, EmbeddingFactors] = {}
        self._current = current

    def put(self, number: int, factors: EmbeddingFactors) -> None:
        """From now on the adapter of that number changes this. No row of a running step may have the number."""
        self._factors[number] = factors

    def remove(self, number: int) -> None:
        """The adapter of that number changes nothing more. No row of a running step may have the number."""
        self._factors.pop(number, None)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.adapt(ids, self._base(ids))

    def adapt(self, ids: Tensor, out: Tensor) -> Tensor:
        """out [n, width], which is changed: the base model's rows of ids [n] -> those of rows with adapters."""
        rows = self._current.rows
        for number, index in () if rows is None else rows.groups:
            if number in self._factors:
                out[index] = self._factors[number].of(ids[index], out[index])
        return out


def _add(factors: Factors, x: Tensor, out: Tensor, index: RowIndex) -> None:
    if isinstance(index, slice):
        factors.add(x[index], out[index])
        return
    part = out.index_select(0, index)
    factors.add(x.index_select(0, index), part)
    out.index_copy_(0, index, part)


def base_of(linear: Linear) -> Linear:
    """The base model's product of a layer with or without adapters."""
    return linear.base if isinstance(linear, AdaptedLinear) else linear
