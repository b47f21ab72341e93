"""DeepSeek V2 and V3: latent attention; fine-grained and shared experts after dense layers."""

from __future__ import annotations

import math
from dataclasses import replace

from model_server.errors import StartupError
from model_server.layers.rotary import Rope
from model_server.layers.routing import Routing
from model_server.models.config import ModelConfig
from model_server.models.decoder.attention.mla import Mla
from model_server.models.decoder.moe import Moe, SeparateExperts
from model_server.models.decoder.spec import Spec
from model_server.models.families.base import base
from model_server.models.families.moe import top_k


def deepseek_v2(config: ModelConfig) -> Spec:
    """Describe V2: softmax, groups by their best expert, scaled weights."""
    _expect(config, "scoring_func", "softmax")
    _expect(config, "norm_topk_prob", False)  # published code and transformers differ in what true means
    num_experts = config.count("n_routed_experts", 64)
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise StartupError(f"config.json: `topk_method` {method!r} is not served for deepseek_v2")
    grouped = method == "group_limited_greedy"
    routing = Routing(
        num_experts=num_experts,
        top_k=top_k(config, num_experts, None),
        num_groups=config.count("n_group") if grouped else 1,
        top_groups=config.count("topk_group") if grouped else 1,
        scaling=config.number("routed_scaling_factor", 1.0),
        wide=True,
    )
    mixture = _experts(config, routing, size=1407, shared=2)
    return _deepseek(config, mixture, default_positions=2048, first_dense=0, adjacent=True)


def deepseek_v3(config: ModelConfig) -> Spec:
    """Describe V3: sigmoids with a correction, groups by their best two, weights summing to the scaling."""
    _expect(config, "scoring_func", "sigmoid")
    _expect(config, "topk_method", "noaux_tc")
    num_experts = config.count("n_routed_experts", 256)
    routing = Routing(
        num_experts=num_experts,
        top_k=top_k(config, num_experts, 8),
        score="sigmoid",
        num_groups=config.count("n_group", 8),
        top_groups=config.count("topk_group", 4),
        group_score="best_two",
        norm=1.0 if config.flag("norm_topk_prob", True) else None,
        scaling=config.number("routed_scaling_factor", 2.5),
        wide=True,
    )
    mixture = replace(_experts(config, routing, size=2048, shared=1), correction="mlp.gate.e_score_correction_bias")
    adjacent = config.flag("rope_interleave", True)
    return _deepseek(config, mixture, default_positions=4096, first_dense=3, adjacent=adjacent)


def _expect(config: ModelConfig, name: str, served: object) -> None:
    """Check a field with one served value."""
    value = config.get(name)
    if value is not None and value != served:
        raise StartupError(f"config.json: `{name}` is served for {config.model_type} as {served!r} only, got {value!r}")


def _experts(config: ModelConfig, routing: Routing, *, size: int, shared: int) -> Moe:
    """Describe experts; defaults of size and shared count; shared ones are stored as one MLP."""
    _expect(config, "moe_layer_freq", 1)
    if routing.num_experts % routing.num_groups != 0:
        raise StartupError(
            f"config.json: `n_routed_experts` ({routing.num_experts}) is not a multiple of `n_group` "
            f"({routing.num_groups})"
        )
    if routing.top_groups > routing.num_groups:
        raise StartupError(
            f"config.json: `topk_group` is {routing.top_groups}, but there are {routing.num_groups} groups"
        )
    eligible = routing.num_experts // routing.num_groups * routing.top_groups
    if eligible < routing.top_k:
        raise StartupError(
            f"config.json: `num_experts_per_tok` is {routing.top_k}, but `topk_group` ({routing.top_groups}) groups "
            f"have {eligible} experts"
        )
    intermediate_size = config.count("moe_intermediate_size", size)
    return Moe(
        routing=routing,
        intermediate_size=intermediate_size,
        router="mlp.gate",
        store=SeparateExperts(),
        shared="mlp.shared_experts",
        shared_size=intermediate_size * config.count("n_shared_experts", shared),
    )


def _deepseek(
    config: ModelConfig,
    mixture: Moe,
    *,
    default_positions: int,
    first_dense: int,
    adjacent: bool,
) -> Spec:
    num_layers = config.count("num_hidden_layers")
    silent = not config.has("q_lora_rank")
    mla = Mla(
        query_rank=1536 if silent else None if config.get("q_lora_rank") is None else config.count("q_lora_rank"),
        latent_rank=config.count("kv_lora_rank", 512),
        rotated_dim=config.count("qk_rope_head_dim", 64),
        plain_dim=config.count("qk_nope_head_dim", 128),
        value_dim=config.count("v_head_dim", 128),
    )
    rope = config.rope(mla.rotated_dim, config.count("max_position_embeddings", default_positions))
    dense = config.get("first_k_dense_replace")
    dense = first_dense if dense is None else dense
    if type(dense) is not int or dense < 0:
        raise StartupError(f"config.json: `first_k_dense_replace` must be a number of layers, got {dense!r}")
    return base(
        # The heads of keys and values are those of queries; their width is not `head_dim`.
        config.replaced(head_dim=mla.rotated_dim, num_key_value_heads=None),
        default_positions=default_positions,
        ropes=(rope,) * num_layers,
        rope_pairs_adjacent=adjacent,
        scale=_scale(rope, mla.plain_dim + mla.rotated_dim),
        attention=mla,
        mlps=tuple(None if i < dense else mixture for i in range(num_layers)),
    )


def _scale(rope: Rope, width: int) -> float:
    """Return the scores' factor: YaRN's mscale counts for query and key."""
    scale = 1 / math.sqrt(width)
    weight = rope.parameters.get("mscale_all_dim")
    if rope.kind == "default" or not weight:
        return scale
    factor = rope.number("factor")
    mscale = 1.0 if factor <= 1 else 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0
    return scale * mscale**2
