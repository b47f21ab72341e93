"""Mixtures of experts as data, and how this rank's part is read from every storage.

Ranks hold a slice of every expert's intermediate dimension, so they route alike and share the work; one sum covers
routed and shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.layers.activation import Activation, activation, sigmoid
from model_server.layers.experts.choice import make_experts
from model_server.layers.experts.experts import Experts, ExpertWeights
from model_server.layers.linear.linear import Linear
from model_server.layers.routing import Router, RouterLinear, Routing
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.mlp import load_mlp
from model_server.models.decoder.parts import Mlp, Step
from model_server.models.decoder.spec import Spec
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.products import ExpertParameter, ExpertPlace, ExpertRows, Product, Products
from model_server.weights.reader import Range

# What transformers calls the parameters of all experts.
_UP, _DOWN = "gate_up_proj", "down_proj"


class ExpertStore(Protocol):
    """How a checkpoint stores a layer's experts."""

    def read(self, loader: Loader, prefix: str, expert: int, moe: Moe, hidden_size: int) -> ExpertWeights:
        """Read this rank's part of one expert."""

    def products(self, moe: Moe, hidden_size: int) -> Products:
        """List the products, relative to the layer."""

    def places(self, moe: Moe) -> Mapping[str, ExpertPlace]:
        """See `MlpSpec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """The experts of a layer, an `MlpSpec`, with names relative to the layer."""

    routing: Routing
    intermediate_size: int
    router: str
    store: ExpertStore
    # A bias on the scores that choose.
    correction: str | None = None
    # The router's name in transformers, if another.
    router_module: str | None = None
    # An MLP of `shared_size` for every token, weighted by the sigmoid of `shared_gate` if named.
    shared: str | None = None
    shared_size: int = 0
    shared_gate: str | None = None
    # Its matrices; a single first one holds both halves.
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    # Its name in transformers, if another.
    shared_module: str | None = None
    # Experts read and give vectors of another width than the model's.
    latent: Latent | None = None
    # Alpha and limit of GPT-OSS's activation; None: the model's.
    swiglu: tuple[float, float] | None = None

    def products(self, spec: Spec) -> Products:
        found = self.store.products(self, spec.hidden_size if self.latent is None else self.latent.size)
        parameters = (f"{name}.{one.name}" for name, some in found.experts.items() for one in some)
        found = replace(
            found,
            linear={**found.linear, self.router: (spec.hidden_size, self.routing.num_experts)},
            of_experts=frozenset((*found.linear, *parameters)),
            other_names={} if self.router_module is None else {self.router_module: self.router},
        )
        if self.shared is None:
            return found
        outer, inner = spec.hidden_size, self.shared_size
        rows = 2 * inner if spec.gated and len(self.shared_up) == 1 else inner
        shared = {f"{self.shared}.{name}": (outer, rows) for name in self.shared_up}
        shared[f"{self.shared}.{self.shared_down}"] = inner, outer
        other_names = dict(found.other_names)
        if self.shared_module is not None:
            other_names |= {name.replace(self.shared, self.shared_module, 1): name for name in shared}
        if self.shared_gate is not None:
            shared[self.shared_gate] = outer, 1
        return replace(found, linear={**found.linear, **shared}, other_names=other_names)

    def places(self) -> Mapping[str, ExpertPlace]:
        return self.store.places(self)

    def load(self, loader: Loader, spec: Spec, index: int) -> Mlp:
        prefix = f"{spec.names.layers}.{index}."
        count = self.routing.num_experts
        width = spec.hidden_size if self.latent is None else self.latent.size
        weights = (self.store.read(loader, prefix, expert, self, width) for expert in range(count))
        router = self._router(loader, prefix, spec.hidden_size)
        silu = spec.gated and self.swiglu is None and spec.activation in ("silu", "swish")
        experts = make_experts(
            weights,
            count,
            self._activation(loader, spec),
            loader.linears,
            on_input=self.routing.on_input,
            silu=silu,
            changes=loader.changes.of_experts,
        )
        routed = RoutedMlp(router, experts)
        if self.latent is not None:
            routed = self.latent.load(loader, prefix, spec.hidden_size, routed)
        if self.shared is None:
            return routed
        gate = None
        if self.shared_gate is not None:
            part = Part(prefix + self.shared_gate, ((0, 1),), 1)
            gate = loader.column_linear([part], spec.hidden_size, as_stored=True)
        return SharedMlp(routed, self._shared(loader, spec, index), gate)

    def _activation(self, loader: Loader, spec: Spec) -> Activation:
        if not spec.gated:
            return activation(spec.activation)
        fused = loader.fused
        return fused.gated(spec.activation) if self.swiglu is None else fused.clamped_swiglu(*self.swiglu)

    def _router(self, loader: Loader, prefix: str, hidden_size: int) -> Router:
        count = self.routing.num_experts
        rows = [(0, count)]
        name = prefix + self.router
        bias = loader.vector(name + ".bias", rows, count) if loader.has(name + ".bias") else None
        correction = None
        if self.correction is not None:  # compared: in float32, whatever the type of the model
            correction = loader.vector(prefix + self.correction, rows, count, torch.float32)
        weight = loader.dense(name, count, hidden_size)
        part = Part(name, tuple(rows), len(weight))
        product = Product(parts=(part,), columns=None, weight=lambda: weight.float(), bias=bias)
        linear = loader.changes.linear(RouterLinear(weight, bias, is_wide=self.routing.wide), product)
        return Router(linear, loader.fused.route(self.routing, correction))

    def _shared(self, loader: Loader, spec: Spec, index: int) -> Mlp:
        up = tuple(f"{self.shared}.{name}" for name in self.shared_up)
        names = replace(spec.names, up=up, down=f"{self.shared}.{self.shared_down}")
        return load_mlp(loader, replace(spec, names=names), index, intermediate_size=self.shared_size)


@dataclass(frozen=True, slots=True)
class Latent:
    """Products before and behind a layer's experts, with names relative to the layer."""

    size: int
    before: str
    behind: str

    def load(self, loader: Loader, prefix: str, hidden_size: int, routed: RoutedMlp) -> RoutedMlp:
        """Put the products around experts; each rank has all of both, as sums over ranks commute with them."""
        if loader.has(f"{prefix}{self.behind}.bias"):
            raise StartupError(f"weight {prefix}{self.behind}.bias: a bias behind latent experts is not served")

        def whole(name: str, rows: int, columns: int) -> Linear:
            return loader.column_linear([Part(prefix + name, ((0, rows),), rows)], columns)

        before, behind = whole(self.before, self.size, hidden_size), whole(self.behind, hidden_size, self.size)
        return replace(routed, before=before, behind=behind)


@dataclass(frozen=True, slots=True)
class RoutedMlp:
    """Sends each token through its chosen experts."""

    router: Router
    experts: Experts
    # Around the experts; None: they read what the router reads.
    before: Linear | None = None
    behind: Linear | None = None

    @property
    def capturable(self) -> bool:
        return self.experts.capturable

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        if self.before is None or self.behind is None:
            return self.experts(hidden, *self.router(hidden))
        return self.behind(self.experts(self.before(hidden), *self.router(hidden)))


@dataclass(frozen=True, slots=True)
class SharedMlp:
    """Routed experts beside a shared MLP."""

    routed: Mlp
    shared: Mlp
    gate: Linear | None  # [1, hidden]

    @property
    def capturable(self) -> bool:
        return self.routed.capturable and self.shared.capturable

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        shared = self.shared(hidden, step)
        if self.gate is not None:
            shared.mul_(sigmoid(self.gate(hidden)))
        return self.routed(hidden, step).add_(shared)


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

    def products(self, moe: Moe, hidden_size: int) -> Products:
        size = moe.intermediate_size
        found: dict[str, tuple[int, int]] = {}
        for expert in range(moe.routing.num_experts):
            name = f"{self.experts}.{expert}."
            found.update((name + one, (hidden_size, size)) for one in self._ups)
            found[name + self.down] = size, hidden_size
        fused = {} if self.gate is None or self.fused is None else {self.fused: _fused(moe, hidden_size)}
        return Products(linear=found, experts=fused)

    @property
    def _ups(self) -> tuple[str, ...]:
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def places(self, moe: Moe) -> Mapping[str, ExpertPlace]:
        up, down = f"{self.fused}.{_UP}", f"{self.fused}.{_DOWN}"
        found: dict[str, ExpertPlace] = {}
        if self.gate is None or self.fused is None:
            return found
        for expert in range(moe.routing.num_experts):
            name = f"{self.experts}.{expert}."
            found[f"{name}{self.gate}.weight"] = ExpertPlace(parameter=up, expert=expert)
            found[f"{name}{self.up}.weight"] = ExpertPlace(parameter=up, expert=expert, first=moe.intermediate_size)
            found[f"{name}{self.down}.weight"] = ExpertPlace(parameter=down, expert=expert)
        return found

    def read(self, loader: Loader, prefix: str, expert: int, moe: Moe, hidden_size: int) -> ExpertWeights:
        size = moe.intermediate_size
        start, stop = share = loader.share(size)
        name = f"{prefix}{self.experts}.{expert}."
        up = MatrixSlice(
            parts=tuple(Part(name + part, (share,), size) for part in self._ups),
            columns=(0, hidden_size),
            num_columns=hidden_size,
        )
        part = Part(name + self.down, ((0, hidden_size),), hidden_size)
        down = MatrixSlice(parts=(part,), columns=share, num_columns=size)
        whole = replace(down, columns=(0, size))
        halves = (share,) if self.gate is None else (share, (size + start, size + stop))
        rows = self._rows(prefix, _UP, expert, halves)
        up_product = Product(
            parts=up.parts, columns=None, weight=lambda: loader.read_again(up, torch.float32), expert=rows
        )
        rows = self._rows(prefix, _DOWN, expert, ((0, hidden_size),))
        down_product = Product(
            parts=down.parts,
            columns=share,
            weight=lambda: loader.read_again(whole, torch.float32),
            adds_bias=loader.tensor_group.rank == 0,
            expert=rows,
        )
        up_bias, down_bias = self._biases(loader, name, share, (size, hidden_size))
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

    def products(self, moe: Moe, hidden_size: int) -> Products:
        return Products(linear={})

    def places(self, moe: Moe) -> Mapping[str, ExpertPlace]:
        return {}

    def read(self, loader: Loader, prefix: str, expert: int, moe: Moe, hidden_size: int) -> ExpertWeights:
        first = expert * moe.intermediate_size
        start, stop = loader.share(moe.intermediate_size)
        rows, of_all = (first + start, first + stop), moe.routing.num_experts * moe.intermediate_size
        up = MatrixSlice(
            parts=tuple(Part(prefix + name, (rows,), of_all) for name in (self.gate, self.up)),
            columns=(0, hidden_size),
            num_columns=hidden_size,
        )
        down = MatrixSlice(
            parts=(Part(prefix + self.down, ((0, hidden_size),), hidden_size),),
            columns=rows,
            num_columns=of_all,
            transposed=True,
            whole=(first, first + moe.intermediate_size),
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

    def products(self, moe: Moe, hidden_size: int) -> Products:
        return Products(linear={}, experts={self.module: _fused(moe, hidden_size, swapped=self.swapped)})

    def places(self, moe: Moe) -> Mapping[str, ExpertPlace]:
        return {
            stored: ExpertPlace(parameter=f"{self.module}.{name}", transposed=not self.rows_first)
            for stored, name in ((self.up, _UP), (self.down, _DOWN))
        }

    def read(self, loader: Loader, prefix: str, expert: int, moe: Moe, hidden_size: int) -> ExpertWeights:
        size = moe.intermediate_size
        start, stop = share = loader.share(size)
        halves = ((2 * start, 2 * stop),) if self.interleaved else (share, (size + start, size + stop))
        up_name, down_name, count = prefix + self.up, prefix + self.down, moe.routing.num_experts
        up = loader.matrix(self._slice(Part(up_name, halves, 2 * size), expert, (0, hidden_size), (count, hidden_size)))
        part = Part(down_name, ((0, hidden_size),), hidden_size)
        down = loader.matrix(self._slice(part, expert, share, (count, size)))
        up_bias = down_bias = None
        if loader.has(up_name + "_bias"):
            bias = loader.rows(up_name + "_bias", [(expert, expert + 1)], 2 * size, count)[0]
            up_bias = torch.cat([bias[a:b] for a, b in halves])
        if (
            loader.has(down_name + "_bias") and loader.tensor_group.rank == 0
        ):  # summed over the ranks it must count once
            down_bias = loader.rows(down_name + "_bias", [(expert, expert + 1)], hidden_size, count)[0]
        loader.reader.skip(down_name + "_bias")
        gate_first = None
        if self.interleaved:
            gate_first = torch.arange(2 * (stop - start), device=loader.device).view(-1, 2).t().flatten()
            up = up.permuted(gate_first)
            up_bias = None if up_bias is None else up_bias[gate_first]
        module = prefix + self.module
        rows = ExpertRows(name=f"{module}.{_UP}", expert=expert, rows=halves, order=gate_first)
        up_product = Product(parts=(), columns=None, weight=_without_lengths, expert=rows)
        rows = ExpertRows(name=f"{module}.{_DOWN}", expert=expert, rows=((0, hidden_size),))
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


def _fused(moe: Moe, hidden_size: int, *, swapped: bool = False) -> tuple[ExpertParameter, ExpertParameter]:
    """Return all experts' gates and ups, and downs."""
    count, size = moe.routing.num_experts, moe.intermediate_size
    return (
        ExpertParameter(name=_UP, num_experts=count, inputs=hidden_size, outputs=2 * size, swapped=swapped),
        ExpertParameter(name=_DOWN, num_experts=count, inputs=size, outputs=hidden_size, swapped=swapped),
    )
