"""Grouped-query attention with experts chosen by corrected sigmoids: GLM 4.5 to 4.7, MiniMax M2, Hunyuan 3."""

from __future__ import annotations

from dataclasses import replace

from model_server.layers.routing import Routing
from model_server.models.config import ModelConfig
from model_server.models.decoder.expert_stores import SeparateExperts
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.spec import Spec
from model_server.models.families.base import base
from model_server.models.families.deepseek import behind_dense, by_layer_types, corrected
from model_server.models.families.moe import EXPERTS, ROUTER, top_k


def glm4_moe(config: ModelConfig) -> Spec:
    """Describe GLM 4.5, 4.6 and 4.7: half of a head rotates; shared experts; the first layer is dense."""
    mixture = corrected(config, num_experts=128, size=1408, chosen=8, groups=(1, 1), scaling=1.0)
    plain = base(
        config,
        default_kv_heads=8,
        default_positions=131072,
        default_eps=1e-5,
        default_rotary_factor=0.5,
    )
    return replace(plain, mlps=behind_dense(config, mixture, 1))


def minimax_m2(config: ModelConfig) -> Spec:
    """Describe MiniMax M2: norms of q and k over all heads; `rotary_dim` numbers of a head rotate."""
    num_experts = config.renamed({"num_local_experts": "num_experts"}).count("num_local_experts", 256)
    mixture = Moe(
        routing=Routing(num_experts=num_experts, top_k=top_k(config, num_experts, 8), score="sigmoid", norm=1.0),
        intermediate_size=config.count("intermediate_size"),
        router=ROUTER,
        router_module="mlp.gate",
        store=EXPERTS,
        correction="block_sparse_moe.e_score_correction_bias",
    )
    if config.get("rotary_dim") is not None and config.get("partial_rotary_factor") is None:
        factor = config.count("rotary_dim") / config.count("head_dim", 128)
        config = config.replaced(partial_rotary_factor=factor)
    plain = base(
        config,
        default_head_dim=128,
        default_kv_heads=8,
        default_positions=196608,
        default_theta=5e6,
        default_rotary_factor=1.0,
    )
    return replace(plain, mlps=(mixture,) * plain.num_layers)


def hy_v3(config: ModelConfig) -> Spec:
    """Describe Hunyuan 3: norms of heads; shared experts; the first layer is dense."""
    num_experts = config.renamed({"num_experts": "num_local_experts"}).count("num_experts", 192)
    size = config.count("moe_intermediate_size", 1536)
    mixture = Moe(
        routing=Routing(
            num_experts=num_experts,
            top_k=top_k(config, num_experts, 8),
            score="sigmoid",
            norm=1.0,
            scaling=config.number("router_scaling_factor", 2.826),
            wide=True,
        ),
        intermediate_size=size,
        router="mlp.router.gate",
        router_module="mlp.gate",
        store=SeparateExperts(),
        correction="mlp.expert_bias",
        shared="mlp.shared_mlp",
        shared_size=size * config.count("num_shared_experts", 1),
    )
    plain = base(
        config.without("partial_rotary_factor"),
        default_head_dim=128,
        default_kv_heads=8,
        default_positions=131072,
        default_eps=1e-5,
        default_theta=11158840.0,
    )
    without_first = config.without("first_k_dense_replace")
    return replace(plain, mlps=by_layer_types(config, mixture) or behind_dense(without_first, mixture, 1))
