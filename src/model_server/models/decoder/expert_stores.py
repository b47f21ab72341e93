"""How checkpoints store the experts of a layer, and how this rank's part is read from each form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from model_server.layers.experts.experts import ExpertWeights
from model_server.models.decoder.loader import Loader
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.products import ExpertParameter, ExpertPlace, ExpertRows, Product, Products
from model_server.weights.reader import Range

# What transformers calls the parameters of all experts.
_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a layer's experts."""

    num_experts: int
    # Width of what they read and give.
    hidden: int
    intermediate: int


class ExpertStore(Protocol):
    """How a checkpoint stores a layer's experts."""

    def read(self, loader: Loader, prefix: str, expert: int, sizes: ExpertSizes) -> ExpertWeights:
        """Read this rank's part of one expert."""

    def products(self, sizes: ExpertSizes) -> Products:
        """List the products, relative to the layer."""

    def places(self, sizes: ExpertSizes) -> Mapping[str, ExpertPlace]:
        """See `MlpSpec`."""


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Three matrices per expert, or two."""

    # What precedes the expert's number.
    experts: str = "mlp.experts"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    # The module that transformers makes of them; None: one that holds them in another order.
    fused: str | None = "mlp.experts"
    # Matrices may have biases.
    biased: bool = False

    def products(self, sizes: ExpertSizes) -> Products:
        size = sizes.intermediate
        found: dict[str, tuple[int, int]] = {}
        for expert in range(sizes.num_experts):
            name = f"{self.experts}.{expert}."
            found.update((name + one, (sizes.hidden, size)) for one in self._ups)
            found[name + self.down] = size, sizes.hidden
        fused = {} if self.gate is None or self.fused is None else {self.fused: _fused(sizes)}
        return Products(linear=found, experts=fused)

    @property
    def _ups(self) -> tuple[str, ...]:
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def places(self, sizes: ExpertSizes) -> Mapping[str, ExpertPlace]:
        up, down = f"{self.fused}.{_UP}", f"{self.fused}.{_DOWN}"
        found: dict[str, ExpertPlace] = {}
        if self.gate is None or self.fused is None:
            return found
        for expert in range(sizes.num_experts):
            name = f"{self.experts}.{expert}."
            found[f"{name}{self.gate}.weight"] = ExpertPlace(parameter=up, expert=expert)
            found[f"{name}{self.up}.weight"] = ExpertPlace(parameter=up, expert=expert, first=sizes.intermediate)
            found[f"{name}{self.down}.weight"] = ExpertPlace(parameter=down, expert=expert)
        return found

    def read(self, loader: Loader, prefix: str, expert: int, sizes: ExpertSizes) -> ExpertWeights:
        size = sizes.intermediate
        start, stop = share = loader.share(size)
        name = f"{prefix}{self.experts}.{expert}."
        up = MatrixSlice(
            parts=tuple(Part(name + part, (share,), size) for part in self._ups),
            columns=(0, sizes.hidden),
            num_columns=sizes.hidden,
        )
        part = Part(name + self.down, ((0, sizes.hidden),), sizes.hidden)
        down = MatrixSlice(parts=(part,), columns=share, num_columns=size)
        whole = replace(down, columns=(0, size))
        halves = (share,) if self.gate is None else (share, (size + start, size + stop))
        rows = self._rows(prefix, _UP, expert, halves)
        up_product = Product(
            parts=up.parts, columns=None, weight=lambda: loader.read_again(up, torch.float32), expert=rows
        )
        rows = self._rows(prefix, _DOWN, expert, ((0, sizes.hidden),))
        down_product = Product(
            parts=down.parts,
            columns=share,
            weight=lambda: loader.read_again(whole, torch.float32),
            adds_bias=loader.tensor_group.rank == 0,
            expert=rows,
        )
        up_bias, down_bias = self._biases(loader, name, share, (size, sizes.hidden))
        return ExpertWeights(loader.matrix(up), loader.matrix(down), up_bias, down_bias, up_product, down_product)

    def _rows(self, prefix: str, name: str, expert: int, rows: Sequence[Range]) -> ExpertRows | None:
        if self.fused is None:
            return None
        return ExpertRows(name=f"{prefix}{self.fused}.{name}", expert=expert, rows=tuple(rows))

    def _biases(
        self, loader: Loader, expert: str, share: Range, sizes: tuple[int, int]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not self.biased:
            return None, None
        ups, down = [f"{expert}{part}.bias" for part in self._ups], f"{expert}{self.down}.bias"
        up_bias = down_bias = None
        if any(map(loader.has, ups)):
            up_bias = torch.cat([loader.vector(name, [share], sizes[0]) for name in ups])
        if loader.has(down) and loader.tensor_group.rank == 0:  # summed over the ranks it must count once
            down_bias = loader.vector(down, [(0, sizes[1])], sizes[1])
        loader.reader.skip(down)
        return up_bias, down_bias


@dataclass(frozen=True, slots=True)
class FlatExperts:
    """DBRX's three matrices [experts * intermediate, hidden], the last transposed."""

    gate: str
    up: str
    down: str

    def products(self, sizes: ExpertSizes) -> Products:
        return Products(linear={})

    def places(self, sizes: ExpertSizes) -> Mapping[str, ExpertPlace]:
        return {}

    def read(self, loader: Loader, prefix: str, expert: int, sizes: ExpertSizes) -> ExpertWeights:
        first = expert * sizes.intermediate
        start, stop = loader.share(sizes.intermediate)
        rows, of_all = (first + start, first + stop), sizes.num_experts * sizes.intermediate
        up = MatrixSlice(
            parts=tuple(Part(prefix + name, (rows,), of_all) for name in (self.gate, self.up)),
            columns=(0, sizes.hidden),
            num_columns=sizes.hidden,
        )
        down = MatrixSlice(
            parts=(Part(prefix + self.down, ((0, sizes.hidden),), sizes.hidden),),
            columns=rows,
            num_columns=of_all,
            transposed=True,
            whole=(first, first + sizes.intermediate),
        )
        return ExpertWeights(loader.matrix(up), loader.matrix(down))


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """A tensor of all gates and ups, one of all downs, perhaps biases."""

    up: str
    down: str
    # Gate and up alternate.
    interleaved: bool = False
    # [experts, out, in] instead of [experts, in, out].
    rows_first: bool = False
    # The module of both in transformers, if another.
    fused: str | None = None
    # See `ExpertParameter`.
    swapped: bool = False

    def products(self, sizes: ExpertSizes) -> Products:
        return Products(linear={}, experts={self.module: _fused(sizes, swapped=self.swapped)})

    def places(self, sizes: ExpertSizes) -> Mapping[str, ExpertPlace]:
        return {
            stored: ExpertPlace(parameter=f"{self.module}.{name}", transposed=not self.rows_first)
            for stored, name in ((self.up, _UP), (self.down, _DOWN))
        }

    def read(self, loader: Loader, prefix: str, expert: int, sizes: ExpertSizes) -> ExpertWeights:
        size = sizes.intermediate
        start, stop = share = loader.share(size)
        halves = ((2 * start, 2 * stop),) if self.interleaved else (share, (size + start, size + stop))
        up_name, down_name, count = prefix + self.up, prefix + self.down, sizes.num_experts
        part = Part(up_name, halves, 2 * size)
        up = loader.matrix(self._slice(part, expert, (0, sizes.hidden), (count, sizes.hidden)))
        part = Part(down_name, ((0, sizes.hidden),), sizes.hidden)
        down = loader.matrix(self._slice(part, expert, share, (count, size)))
        up_bias = down_bias = None
        if loader.has(up_name + "_bias"):
            bias = loader.rows(up_name + "_bias", [(expert, expert + 1)], 2 * size, count)[0]
            up_bias = torch.cat([bias[a:b] for a, b in halves])
        if (
            loader.has(down_name + "_bias") and loader.tensor_group.rank == 0
        ):  # summed over the ranks it must count once
            down_bias = loader.rows(down_name + "_bias", [(expert, expert + 1)], sizes.hidden, count)[0]
        loader.reader.skip(down_name + "_bias")
        gate_first = None
        if self.interleaved:
            gate_first = torch.arange(2 * (stop - start), device=loader.device).view(-1, 2).t().flatten()
            up = up.permuted(gate_first)
            up_bias = None if up_bias is None else up_bias[gate_first]
        module = prefix + self.module
        rows = ExpertRows(name=f"{module}.{_UP}", expert=expert, rows=halves, order=gate_first)
        up_product = Product(parts=(), columns=None, weight=_without_lengths, expert=rows)
        rows = ExpertRows(name=f"{module}.{_DOWN}", expert=expert, rows=((0, sizes.hidden),))
        down_product = Product(parts=(), columns=share, weight=_without_lengths, expert=rows)
        return ExpertWeights(up, down, up_bias, down_bias, up_product, down_product)

    @property
    def module(self) -> str:
        """Return the module that transformers has for all of them."""
        return self.fused or self.up.rpartition(".")[0]

    def one_by_one(self, gate: str, up: str, down: str) -> SeparateExperts:
        """Return the same with a module for each matrix."""
        is_same = self.rows_first and not self.interleaved and not self.swapped
        return SeparateExperts(self.module, gate, up, down, self.module if is_same else None, biased=True)

    def _slice(self, part: Part, expert: int, columns: Range, sizes: tuple[int, int]) -> MatrixSlice:
        """Return a part of one expert's [out, in], of all experts' sizes."""
        num_experts, num_columns = sizes
        return MatrixSlice(
            parts=(part,),
            columns=columns,
            num_columns=num_columns,
            transposed=not self.rows_first,
            expert=expert,
            num_experts=num_experts,
        )


def _without_lengths() -> Tensor:
    """Stand for weights, which need not be kept beside their packed form."""
    raise AssertionError("DoRA's lengths are not served for a parameter of all experts")


def _fused(sizes: ExpertSizes, *, swapped: bool = False) -> tuple[ExpertParameter, ExpertParameter]:
    """Return all experts' gates and ups, and downs."""
    count, size, hidden = sizes.num_experts, sizes.intermediate, sizes.hidden
    return (
        ExpertParameter(name=_UP, num_experts=count, inputs=hidden, outputs=2 * size, swapped=swapped),
        ExpertParameter(name=_DOWN, num_experts=count, inputs=size, outputs=hidden, swapped=swapped),
    )
