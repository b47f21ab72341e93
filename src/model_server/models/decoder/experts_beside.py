"""A dense MLP and experts beside it, each between norms of its own (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from model_server.layers.experts.experts import Experts
from model_server.layers.norm import Norm
from model_server.layers.routing import Router
from model_server.models.decoder.blocks import Reduce
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.mlp import load_mlp
from model_server.models.decoder.moe import Moe, RoutedMlp
from model_server.models.decoder.parts import Mlp, Step
from model_server.models.decoder.spec import Spec
from model_server.weights.products import ExpertPlace, Products


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBeside:
    """An `MlpSpec`, with names relative to the layer."""

    experts: Moe
    norm: str  # before the dense MLP
    post_norm: str
    experts_norm: str
    experts_post_norm: str
    # Multiplies what the router reads, behind a norm, and the weights that it gives.
    router_scale: str
    expert_scale: str

    def products(self, spec: Spec) -> Products:
        found = self.experts.products(spec)
        outer, inner = spec.hidden_size, spec.intermediate_size
        dense = dict.fromkeys(spec.names.up, (outer, inner))
        return replace(found, linear={**found.linear, **dense, spec.names.down: (inner, outer)})

    def places(self, spec: Spec) -> Mapping[str, ExpertPlace]:
        return self.experts.places(spec)

    def load(self, loader: Loader, spec: Spec, index: int) -> ExpertsBesideMlp:
        prefix, size = f"{spec.names.layers}.{index}.", spec.hidden_size
        count = self.experts.routing.num_experts
        routed = self.experts.load(loader, spec, index)
        assert isinstance(routed, RoutedMlp), "there is no shared expert"
        scale = loader.vector(prefix + self.router_scale, [(0, size)], size).float().mul_(size**-0.5)
        return ExpertsBesideMlp(
            dense=load_mlp(loader, spec, index),
            router=routed.router,
            experts=routed.experts,
            reduce=loader.tensor_group.all_reduce,
            norm=loader.norm(prefix + self.norm, size),
            post_norm=loader.norm(prefix + self.post_norm, size),
            experts_norm=loader.norm(prefix + self.experts_norm, size),
            experts_post_norm=loader.norm(prefix + self.experts_post_norm, size),
            router_norm=loader.fused.rms_norm(scale, spec.norm_eps),
            expert_scale=loader.vector(prefix + self.expert_scale, [(0, count)], count).float(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBesideMlp:
    """post_norm(dense(norm(x))) + experts_post_norm(experts(experts_norm(x))), each summed over the ranks."""

    dense: Mlp
    router: Router
    experts: Experts
    reduce: Reduce
    norm: Norm
    post_norm: Norm
    experts_norm: Norm
    experts_post_norm: Norm
    router_norm: Norm
    expert_scale: Tensor  # [num_experts] float32

    @property
    def capturable(self) -> bool:
        return self.dense.capturable and self.experts.capturable

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Return the sum over all ranks, new, of the stream [n, hidden]."""
        dense = self.post_norm(self.reduce(self.dense(self.norm(hidden), step)))
        weights, chosen = self.router(self.router_norm(hidden))
        weights = weights * self.expert_scale[chosen]
        routed = self.reduce(self.experts(self.experts_norm(hidden), weights, chosen))
        return dense.add_(self.experts_post_norm(routed))
