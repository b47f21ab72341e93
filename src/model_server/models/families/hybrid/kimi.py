"""Kimi Linear: Kimi's delta attention in three of four layers, latent attention without rotations in the fourth."""

from __future__ import annotations

from dataclasses import replace

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.expert_stores import SeparateExperts
from model_server.models.decoder.mixers.kimi_delta import KimiDeltaSpec
from model_server.models.decoder.spec import Spec
from model_server.models.families.base import layer_kinds
from model_server.models.families.deepseek import by_layer_types, corrected, expect, latent_decoder
from model_server.models.families.moe import indices

_KINDS = ("linear_attention", "full_attention")
# How published configs call V3's fields, and transformers calls them when it has read them.
_NAMES: dict[str, str | tuple[str, ...]] = {
    "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "num_experts_per_tok"),
    "n_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "n_group": ("num_expert_group", "n_group"),
    "norm_topk_prob": ("moe_renormalize", "norm_topk_prob"),
    "scoring_func": "moe_router_activation_func",
}
_MADE = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_STORED = "block_sparse_moe"


def kimi_linear(config: ModelConfig) -> Spec:
    """Describe Kimi Linear: V3's experts under Mixtral's names."""
    expect(config, "mla_use_nope", True)
    config, linear = config.renamed(_NAMES), _linear_config(config)
    mixture = replace(
        corrected(config, num_experts=256, size=1024, chosen=8, groups=(1, 1), scaling=2.446),
        router=f"{_STORED}.gate",
        router_module="mlp.gate",
        store=SeparateExperts(f"{_STORED}.experts", "w1", "w3", "w2"),
        correction=f"{_STORED}.gate.e_score_correction_bias",
        shared=f"{_STORED}.shared_experts",
        shared_module="mlp.shared_experts",
    )
    mixer = KimiDeltaSpec(
        heads=linear.count("num_heads", 32),
        head_dim=linear.count("head_dim", 128),
        width=linear.count("short_conv_kernel_size", 4),
    )
    if mixer.width < 2:
        name = linear.named("short_conv_kernel_size")
        raise StartupError(f"config.json: `{name}` must be at least 2, got 1")
    expect(config, "hidden_act", "silu")
    kinds = _kinds(config, linear)
    plain = latent_decoder(
        config if config.has("q_lora_rank") else config.replaced(q_lora_rank=None),
        mixture,
        default_positions=1048576,
        first_dense=1,
        adjacent=True,
        default_eps=1e-5,
        rotates=False,
    )
    mlps = by_layer_types(config, mixture) or plain.mlps
    names = replace(plain.names, spellings=((".mlp.", f".{_STORED}."),))
    mixers = tuple(mixer if kind == "linear_attention" else None for kind in kinds)
    return replace(plain, names=names, mlps=mlps, mixers=mixers)


def _linear_config(config: ModelConfig) -> ModelConfig:
    """Return the fields of `linear_attn_config`, or those that transformers makes of them."""
    block = config.get("linear_attn_config")
    if block is None:
        block = {}
    if not isinstance(block, dict):
        raise StartupError(f"config.json: `linear_attn_config` must be an object, got {block!r}")
    made = {name: config.get(name) for name in _MADE.values()}
    return ModelConfig(made | block).renamed({ours: (ours, theirs) for ours, theirs in _MADE.items()})


def _kinds(config: ModelConfig, linear: ModelConfig) -> list[str]:
    """Return what each layer has: `layer_types`, or the layers of both kinds, counted from 1."""
    num_layers = config.count("num_hidden_layers")
    default = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)]
    full, delta = indices(linear, "full_attn_layers"), indices(linear, "kda_layers")
    if full is not None and delta is not None:
        if sorted(full + delta) != [*range(1, num_layers + 1)]:
            raise StartupError(
                f"config.json: `full_attn_layers` and `kda_layers` must name the layers 1 to {num_layers}, each once"
            )
        default = ["full_attention" if i + 1 in full else "linear_attention" for i in range(num_layers)]
    kinds = layer_kinds(config, default, _KINDS)
    if "full_attention" not in kinds:
        raise StartupError("config.json: no layer has attention, which is not served")
    return kinds
