"""Llama's and Qwen's kin with experts: Mixtral, Qwen 2 and 3 MoE, Phi 3.5 MoE, DBRX, GPT-OSS."""

from __future__ import annotations

from dataclasses import replace

from model_server.errors import StartupError
from model_server.layers.routing import Routing
from model_server.models.config import ModelConfig
from model_server.models.families.base import base, one_window
from model_server.models.moe import Moe, SeparateExperts
from model_server.models.spec import Spec

_MIXTRAL_EXPERTS = SeparateExperts("block_sparse_moe.experts", "w1", "w3", "w2")


def mixtral(config: ModelConfig) -> Spec:
    """Mistral with the best two of eight experts, their weights made to sum to 1."""
    plan = Moe(
        routing=routing_of(config, "num_local_experts", default_experts=8, default_top_k=2, norm=1.0),
        intermediate_size=config.count("intermediate_size"),
        router="block_sparse_moe.gate",
        store=_MIXTRAL_EXPERTS,
    )
    plain = base(
        config, default_kv_heads=8, default_positions=131072, default_eps=1e-5, default_theta=1e6,
        windows=one_window(config, None),
    )  # fmt: skip
    return replace(plain, mlps=(plan,) * plain.num_layers)


def routing_of(
    config: ModelConfig,
    experts: str,
    *,
    default_experts: int,
    default_top_k: int,
    norm: float | None = None,
) -> Routing:
    """The plain routing: softmax, the best `num_experts_per_tok` of as many experts as the field `experts` says."""
    num_experts = config.count(experts, default_experts)
    return Routing(num_experts=num_experts, top_k=top_k_of(config, num_experts, default_top_k), norm=norm)


def top_k_of(config: ModelConfig, num_experts: int, default: int | None) -> int:
    """`num_experts_per_tok`, refused if there are fewer experts."""
    top_k = config.count("num_experts_per_tok", default)
    if top_k > num_experts:
        raise StartupError(
            f"config.json: `num_experts_per_tok` ({top_k}) is more than there are experts ({num_experts})"
        )
    return top_k
