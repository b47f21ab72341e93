"""Qwen 3 Next and Qwen 3.5: gated delta nets in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.mixers.gated_delta import GatedDeltaSpec, Packing
from model_server.models.decoder.spec import Spec
from model_server.models.families.base import base, layer_kinds
from model_server.models.families.moe import qwen_layers, qwen_mixture

_KINDS = ("linear_attention", "full_attention")


def qwen3_next(config: ModelConfig) -> Spec:
    """Describe Qwen 3 Next: experts by default everywhere; delta nets packed by heads."""
    config = config.renamed({}, norm_topk_prob=True)
    mixture = replace(
        qwen_mixture(config, experts=512, chosen=10, size=512),
        shared="mlp.shared_expert",
        shared_size=config.count("shared_expert_intermediate_size", 512),
        shared_gate="mlp.shared_expert_gate",
    )
    # As GGUF files have it.
    is_apart = config.flag("linear_qkv_apart", False)
    plain = _qwen(config, packing="heads of strengths" if is_apart else "heads", kv_heads=2)
    return replace(plain, mlps=qwen_layers(config, mixture))


def qwen3_5_text(config: ModelConfig) -> Spec:
    """Describe Qwen 3.5: dense, a matrix for each kind of row."""
    return _qwen(config, packing="kinds", kv_heads=4)


def qwen3_5_moe_text(config: ModelConfig) -> Spec:
    """Describe Qwen 3.5 MoE: experts in all layers, weights summing to 1."""
    config = config.replaced(norm_topk_prob=True)
    mixture = replace(
        qwen_mixture(config, experts=256, chosen=8, size=512),
        shared="mlp.shared_expert",
        shared_size=config.count("shared_expert_intermediate_size", 512),
        shared_gate="mlp.shared_expert_gate",
    )
    size = mixture.intermediate_size
    plain = _qwen(config, packing="kinds", kv_heads=2, intermediate_size=size)
    return replace(plain, mlps=(mixture,) * plain.num_layers)


def _qwen(config: ModelConfig, *, packing: Packing, kv_heads: int, **differences: Any) -> Spec:
    num_layers, interval = config.count("num_hidden_layers"), config.count("full_attention_interval", 4)
    default = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]
    kinds = layer_kinds(config, default, _KINDS)
    if "full_attention" not in kinds:
        raise StartupError("config.json: `layer_types` names no layer with attention, which is not served")
    mixer = GatedDeltaSpec(
        key_heads=config.count("linear_num_key_heads", 16),
        value_heads=config.count("linear_num_value_heads", 32),
        key_dim=config.count("linear_key_head_dim", 128),
        value_dim=config.count("linear_value_head_dim", 128),
        width=config.count("linear_conv_kernel_dim", 4),
        packing=packing,
    )
    mixer.check(config)
    return base(
        config,
        default_head_dim=256,
        default_kv_heads=kv_heads,
        default_positions=32768,
        default_rotary_factor=0.25,
        norm_offset=1.0,
        gated_attention=True,
        left_over=(r"^mtp\.",),  # multi-token prediction
        mixers=tuple(mixer if kind == "linear_attention" else None for kind in kinds),
        **differences,
    )
