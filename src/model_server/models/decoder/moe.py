"""Mixtures of experts as data, and what computes them.

Ranks hold a slice of every expert's intermediate dimension, so they route alike and share the work; one sum covers
routed and shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.layers.activation import Activation, activation, sigmoid
from model_server.layers.experts.choice import make_experts
from model_server.layers.experts.experts import Experts
from model_server.layers.linear.linear import Linear
from model_server.layers.routing import Router, RouterLinear, Routing
from model_server.models.decoder.expert_stores import ExpertSizes, ExpertStore
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.mlp import load_mlp
from model_server.models.decoder.parts import Mlp, Step
from model_server.models.decoder.spec import Spec
from model_server.weights.matrix import Part
from model_server.weights.products import ExpertPlace, Product, Products


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
        found = self.store.products(self._sizes(spec))
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

    def places(self, spec: Spec) -> Mapping[str, ExpertPlace]:
        return self.store.places(self._sizes(spec))

    def _sizes(self, spec: Spec) -> ExpertSizes:
        width = spec.hidden_size if self.latent is None else self.latent.size
        return ExpertSizes(self.routing.num_experts, width, self.intermediate_size)

    def load(self, loader: Loader, spec: Spec, index: int) -> Mlp:
        prefix = f"{spec.names.layers}.{index}."
        count = self.routing.num_experts
        sizes = self._sizes(spec)
        weights = (self.store.read(loader, prefix, expert, sizes) for expert in range(count))
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
