"""DeepSeek V2, V3, V3.2, GLM 5: latent attention, sparse or not; fine-grained and shared experts after dense layers."""

from __future__ import annotations

import math
from dataclasses import replace

from model_server.errors import StartupError
from model_server.layers.rotary import Rope
from model_server.layers.routing import Routing
from model_server.models.config import ModelConfig
from model_server.models.decoder.attention.indexer import IndexerSpec
from model_server.models.decoder.attention.mla import Mla
from model_server.models.decoder.expert_stores import SeparateExperts
from model_server.models.decoder.moe import Moe
from model_server.models.decoder.spec import Spec
from model_server.models.families.base import base, layer_kinds, sharpening
from model_server.models.families.moe import top_k
from wire.indexers import full_indexers

_CORRECTION = "mlp.gate.e_score_correction_bias"
# What transformers takes a silent Mistral 4 config to mean.
MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Kinds of layers in `mlp_layer_types`.
_KINDS = ("dense", "sparse")


def deepseek_v2(config: ModelConfig) -> Spec:
    """Describe V2: softmax, groups by their best expert, scaled weights."""
    expect(config, "scoring_func", "softmax")
    expect(config, "norm_topk_prob", False)  # published code and transformers differ in what true means
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
    return latent_decoder(config, mixture, default_positions=2048, first_dense=0, adjacent=True)


def deepseek_v3(config: ModelConfig) -> Spec:
    """Describe V3: sigmoids with a correction, groups by their best two, weights summing to the scaling."""
    mixture = corrected(config, num_experts=256, size=2048, chosen=8, groups=(8, 4), scaling=2.5)
    adjacent = config.flag("rope_interleave", True)
    return latent_decoder(config, mixture, default_positions=4096, first_dense=3, adjacent=adjacent)


def glm4_moe_lite(config: ModelConfig) -> Spec:
    """Describe GLM 4.7 Flash: V3 without groups, of other sizes."""
    mixture = corrected(config, num_experts=64, size=1536, chosen=4, groups=(1, 1), scaling=1.8)
    adjacent = config.flag("rope_interleave", True)
    config = _with_sizes(config, q_lora_rank=768, v_head_dim=256, qk_nope_head_dim=192)
    plain = latent_decoder(
        config, mixture, default_positions=202752, first_dense=1, adjacent=adjacent, default_eps=1e-5
    )
    return replace(plain, mlps=by_layer_types(config, mixture) or plain.mlps)


def deepseek_v32(config: ModelConfig) -> Spec:
    """Describe V3.2: V3 with an indexer in every layer."""
    mixture = corrected(config, num_experts=256, size=2048, chosen=8, groups=(8, 4), scaling=2.5)
    plain = latent_decoder(config, mixture, default_positions=163840, first_dense=3, adjacent=True)
    layers = (True,) * plain.num_layers
    return _with_indexer(config, mixture, plain, heads=64, adjacent=False, full=layers)


def glm_moe_dsa(config: ModelConfig) -> Spec:
    """Describe GLM 5: V3.2 of other sizes; layers may read what an indexer of a layer before them chose."""
    mixture = corrected(config, num_experts=256, size=2048, chosen=8, groups=(1, 1), scaling=2.5)
    config = _with_sizes(config, q_lora_rank=2048, v_head_dim=256, qk_nope_head_dim=192)
    plain = latent_decoder(config, mixture, default_positions=202752, first_dense=3, adjacent=True, default_eps=1e-5)
    full = full_indexers(config.get, plain.num_layers)
    if full is None:
        raise StartupError(
            f"config.json: `indexer_types` must name {plain.num_layers} times full or shared, full in the first layer"
        )
    return _with_indexer(config, mixture, plain, heads=32, adjacent=True, full=full)


def _with_indexer(
    config: ModelConfig, mixture: Moe, plain: Spec, *, heads: int, adjacent: bool, full: tuple[bool, ...]
) -> Spec:
    """Add an indexer, with a family's own number of heads."""
    expect(config, "rope_interleave", True)
    expect(config, "indexer_rope_interleave", adjacent)
    layer_kinds(config, ["indexed_attention"] * plain.num_layers, ("indexed_attention",))
    mla = plain.attention
    assert isinstance(mla, Mla)
    if mla.query_rank is None:
        raise StartupError("config.json: `q_lora_rank` is null, but an indexer reads the latents of queries")
    indexer = IndexerSpec(
        heads=config.count("index_n_heads", heads),
        head_dim=config.count("index_head_dim", 128),
        top_k=config.count("index_topk", 2048),
        adjacent=adjacent,
        full=full,
    )
    if indexer.head_dim < mla.rotated_dim:
        raise StartupError(
            f"config.json: `index_head_dim` is {indexer.head_dim}, but `qk_rope_head_dim` ({mla.rotated_dim}) numbers "
            "of a head rotate"
        )
    mlps = by_layer_types(config, mixture) or plain.mlps
    return replace(plain, mlps=mlps, attention=replace(mla, indexer=indexer))


def mistral4(config: ModelConfig) -> Spec:
    """Describe Mistral 4 (Small 4): softmax, groups by their best two; queries sharpen with their position."""
    if not config.rope_block():
        config = config.replaced(rope_parameters=MISTRAL4_ROPE)
    config = _with_sizes(config, q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64)
    expect(config, "head_dim", config.count("qk_nope_head_dim", 64) + config.count("qk_rope_head_dim", 64))
    num_experts = config.count("n_routed_experts", 128)
    routing = Routing(
        num_experts=num_experts,
        top_k=top_k(config, num_experts, 4),
        num_groups=config.count("n_group", 1),
        top_groups=config.count("topk_group", 1),
        group_score="best_two",
        norm=1.0 if config.flag("norm_topk_prob", True) else None,
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    mixture = _experts(config, routing, size=2048, shared=1)
    adjacent = config.flag("rope_interleave", True)
    plain = latent_decoder(config, mixture, default_positions=1048576, first_dense=0, adjacent=adjacent)
    return replace(plain, temperature=sharpening(config))


def _with_sizes(config: ModelConfig, **sizes: int) -> ModelConfig:
    """Give absent fields a family's own defaults."""
    return config.replaced(**{name: size for name, size in sizes.items() if not config.has(name)})


def corrected(
    config: ModelConfig, *, num_experts: int, size: int, chosen: int, groups: tuple[int, int], scaling: float
) -> Moe:
    """Describe V3's experts and their choice, with defaults of a family for absent fields.

    Args:
        groups: How many there are, and how many are open.
    """
    expect(config, "scoring_func", "sigmoid")
    expect(config, "topk_method", "noaux_tc")
    num_experts = config.count("n_routed_experts", num_experts)
    routing = Routing(
        num_experts=num_experts,
        top_k=top_k(config, num_experts, chosen),
        score="sigmoid",
        num_groups=config.count("n_group", groups[0]),
        top_groups=config.count("topk_group", groups[1]),
        group_score="best_two",
        norm=1.0 if config.flag("norm_topk_prob", True) else None,
        scaling=config.number("routed_scaling_factor", scaling),
        wide=True,
    )
    return replace(_experts(config, routing, size=size, shared=1), correction=_CORRECTION)


def expect(config: ModelConfig, name: str, served: object) -> None:
    """Check a field with one served value."""
    value = config.get(name)
    if value is not None and value != served:
        name = config.named(name)
        raise StartupError(f"config.json: `{name}` is served for {config.model_type} as {served!r} only, got {value!r}")


def _experts(config: ModelConfig, routing: Routing, *, size: int, shared: int) -> Moe:
    """Describe experts; defaults of size and shared count; shared ones are stored as one MLP."""
    named = config.named
    expect(config, "moe_layer_freq", 1)
    if routing.num_experts % routing.num_groups != 0:
        raise StartupError(
            f"config.json: `{named('n_routed_experts')}` ({routing.num_experts}) is not a multiple of "
            f"`{named('n_group')}` ({routing.num_groups})"
        )
    if routing.top_groups > routing.num_groups:
        raise StartupError(
            f"config.json: `{named('topk_group')}` is {routing.top_groups}, but there are {routing.num_groups} groups"
        )
    eligible = routing.num_experts // routing.num_groups * routing.top_groups
    if eligible < routing.top_k:
        raise StartupError(
            f"config.json: `{named('num_experts_per_tok')}` is {routing.top_k}, but `{named('topk_group')}` "
            f"({routing.top_groups}) groups have {eligible} experts"
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


def latent_decoder(
    config: ModelConfig,
    mixture: Moe,
    *,
    default_positions: int,
    first_dense: int,
    adjacent: bool,
    default_eps: float = 1e-6,
    rotates: bool = True,
) -> Spec:
    """Describe a decoder of latent attention, with defaults of a family for absent fields.

    Args:
        first_dense: How many layers have no experts, without `first_k_dense_replace`.
        adjacent: See `Spec.rope_pairs_adjacent`.
        rotates: False: what others rotate of queries and keys stays as it is.
    """
    num_layers = config.count("num_hidden_layers")
    silent = not config.has("q_lora_rank")
    mla = Mla(
        query_rank=1536 if silent else None if config.get("q_lora_rank") is None else config.count("q_lora_rank"),
        latent_rank=config.count("kv_lora_rank", 512),
        rotated_dim=config.count("qk_rope_head_dim", 64),
        plain_dim=config.count("qk_nope_head_dim", 128),
        value_dim=config.count("v_head_dim", 128),
    )
    rope = None
    if rotates:
        rope = config.rope(mla.rotated_dim, config.count("max_position_embeddings", default_positions))
    return base(
        # The heads of keys and values are those of queries; their width is not `head_dim`.
        config.replaced(head_dim=mla.rotated_dim, num_key_value_heads=None),
        default_positions=default_positions,
        default_eps=default_eps,
        ropes=(rope,) * num_layers,
        rope_pairs_adjacent=adjacent,
        scale=_scale(rope, mla.plain_dim + mla.rotated_dim),
        attention=mla,
        mlps=behind_dense(config, mixture, first_dense),
    )


def behind_dense(config: ModelConfig, mixture: Moe, first_dense: int) -> tuple[Moe | None, ...]:
    """Give layers the mixture, except the first ones: `first_k_dense_replace`, or a family's own number."""
    dense = config.get("first_k_dense_replace")
    dense = first_dense if dense is None else dense
    if type(dense) is not int or dense < 0:
        raise StartupError(
            f"config.json: `{config.named('first_k_dense_replace')}` must be a number of layers, got {dense!r}"
        )
    return tuple(None if i < dense else mixture for i in range(config.count("num_hidden_layers")))


def by_layer_types(config: ModelConfig, mixture: Moe) -> tuple[Moe | None, ...] | None:
    """Give layers the mixture where `mlp_layer_types` says so, if it is there."""
    num_layers = config.count("num_hidden_layers")
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise StartupError(f"config.json: `mlp_layer_types` must name {num_layers} times one of {', '.join(_KINDS)}")
    return tuple(mixture if kind == "sparse" else None for kind in kinds)


def _scale(rope: Rope | None, width: int) -> float:
    """Return the scores' factor: YaRN's mscale counts for query and key."""
    scale = 1 / math.sqrt(width)
    if rope is None:
        return scale
    weight = rope.parameters.get("mscale_all_dim")
    if rope.kind == "default" or not weight:
        return scale
    factor = rope.number("factor")
    mscale = 1.0 if factor <= 1 else 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0
    return scale * mscale**2
