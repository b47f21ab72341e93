"""A product with LoRA adapters: rows of a batch that have one get its B @ A @ x added to the base model's product."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from model_server.adapters.factors import EmbeddingFactors, Factors, HeadRows
from model_server.adapters.panels import AdapterPanels
from model_server.adapters.rows import CurrentRows, RowIndex
from model_server.cpp.library import usable
from model_server.layers.embedding import Embedding
from model_server.layers.linear.linear import Linear


class AdaptedLinear:
    """A `Linear`: the base model's product, and that of adapters for the rows that have one.

    Rows without an adapter are what `base` gives, bit for bit.
    """

    __slots__ = ("_current", "_factors", "_rows", "base", "panels")

    def __init__(
        self,
        base: Linear,
        factors: Mapping[int, Factors],
        current: CurrentRows,
        number: int,
        rows: Mapping[int, HeadRows] = MappingProxyType({}),
    ) -> None:
        """factors: by the number of the adapter. current: whose rows are read at each call. number: of all adapters of
        the model. rows: what adapters have in place of rows of the base model's matrix.

        panels: the factors as the C++ operators read them; None where these do not serve.
        """
        self.base = base
        matrices = [f.a for f in factors.values()]
        has_panels = bool(matrices) and usable(matrices[0].device, matrices[0].dtype)
        self.panels = AdapterPanels(factors, number) if has_panels else None
        self._factors = factors if self.panels is None else {}
        self._rows = rows
        self._current = current

    def __call__(self, x: Tensor) -> Tensor:
        return self._with_adapters(x, self.base(x))

    def wide(self, x: Tensor) -> Tensor:
        return self._with_adapters(x, self.base.wide(x))

    def _with_adapters(self, x: Tensor, out: Tensor) -> Tensor:
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

    def __init__(self, base: Embedding, factors: Mapping[int, EmbeddingFactors], current: CurrentRows) -> None:
        """factors: by the number of the adapter. current: whose rows are read at each call."""
        self._base = base
        self._factors = factors
        self._current = current

    def __call__(self, ids: Tensor) -> Tensor:
        out = self._base(ids)
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
