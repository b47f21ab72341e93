"""LFM2 and its mixture of experts: short convolutions in most layers."""

from __future__ import annotations

from dataclasses import replace

from model_server.errors import StartupError
from model_server.layers.routing import Routing
from model_server.models.config import ModelConfig
from model_server.models.decoder.expert_stores import SeparateExperts
from model_server.models.decoder.mixers.short_conv import ShortConvSpec
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, layer_kinds
from model_server.models.families.moe import indices, top_k

_NAMES = Names(
    attention_norm="operator_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    mlp_norm="ffn_norm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    norm="model.embedding_norm",
)


def lfm2(config: ModelConfig) -> Spec:
    """Describe LFM2, whose MLP is two thirds of the file's, scaled and rounded up, unless it says not."""
    config = config.renamed({"intermediate_size": ("block_ff_dim", "intermediate_size")})
    size = config.count("intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        # Without the field 1; null means as it is, not even rounded.
        factor = config.optional_number("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            multiple = config.count("block_multiple_of", 256)
            size = -(-int(factor * size) // multiple) * multiple
    return _lfm2(config, size)


def lfm2_moe(config: ModelConfig) -> Spec:
    """Describe LFM2 MoE: experts behind the first layers, chosen by sigmoids and a bias."""
    num_layers, num_experts = config.count("num_hidden_layers"), config.count("num_experts", 32)
    routing = Routing(
        num_experts=num_experts,
        top_k=top_k(config, num_experts, 4),
        score="sigmoid",
        norm=1.0 if config.flag("norm_topk_prob", True) else None,
        guard=1e-6,
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    mixture = Moe(
        routing=routing,
        intermediate_size=config.count("moe_intermediate_size", 1792),
        router="feed_forward.gate",
        store=SeparateExperts("feed_forward.experts", "w1", "w3", "w2", fused="feed_forward.experts"),
        correction="feed_forward.expert_bias" if config.flag("use_expert_bias", True) else None,
    )
    num_dense = 0 if config.get("num_dense_layers") == 0 else config.count("num_dense_layers", 2)
    plain = _lfm2(config, config.count("intermediate_size"))
    return replace(plain, mlps=tuple(None if index < num_dense else mixture for index in range(num_layers)))


def _lfm2(config: ModelConfig, intermediate_size: int) -> Spec:
    num_layers = config.count("num_hidden_layers")
    attention = indices(config, "full_attn_idxs")
    default = ["full_attention" if attention is None or index in attention else "conv" for index in range(num_layers)]
    kinds = layer_kinds(config, default, ("conv", "full_attention"))
    if "full_attention" not in kinds:
        raise StartupError("config.json: `layer_types` names no layer with attention, which is not served")
    width = config.count("conv_L_cache", 3)
    if width < 2:
        raise StartupError(f"config.json: `conv_L_cache` must be at least 2, got {width}")
    mixer = ShortConvSpec(width=width)
    return base(
        config.renamed({"rms_norm_eps": "norm_eps", "tie_word_embeddings": ("tie_embedding", "tie_word_embeddings")}),
        default_kv_heads=8,
        default_eps=1e-5,
        default_positions=128_000,
        default_theta=1e6,
        tied=True,
        names=_NAMES,
        intermediate_size=intermediate_size,
        activation="silu",
        mixers=tuple(mixer if kind == "conv" else None for kind in kinds),
    )
