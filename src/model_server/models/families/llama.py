"""Llama and similar families: RMS norms, rotation, gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model_server.errors import StartupError
from model_server.layers.alibi import bloom_slopes
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, layer_kinds, one_window, sharpening, windows_of

# What tells Baichuan 2, whose head is normalised, from Baichuan 1: its config has no other mark.
BAICHUAN2_VOCAB = 125696
# What transformers takes a silent Ministral 3 config to mean.
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def llama(config: ModelConfig) -> Spec:
    """The pattern of all others."""
    return base(config)


def mistral(config: ModelConfig) -> Spec:
    """Describe Mistral: one window, 4096 if absent, none if null."""
    return base(config, default_kv_heads=8, default_positions=131072, windows=one_window(config, 4096))


def ministral3(config: ModelConfig) -> Spec:
    """Describe Ministral 3: YaRN; queries sharpen with their position."""
    if not config.rope_block():
        config = config.replaced(rope_parameters=MINISTRAL3_ROPE)
    return base(
        config,
        default_head_dim=128,
        default_kv_heads=8,
        default_positions=262144,
        default_eps=1e-5,
        windows=one_window(config, None),
        temperature=sharpening(config),
    )


def qwen2(config: ModelConfig) -> Spec:
    """Describe Qwen 2: windows per layer, biases of q, k and v."""
    return base(config, default_positions=32768, windows=_qwen_windows(config))


def qwen3(config: ModelConfig) -> Spec:
    """Describe Qwen 3: heads of 128 by default, norms of heads."""
    return base(config, default_head_dim=128, default_positions=32768, windows=_qwen_windows(config))


def _qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Return windows with `use_sliding_window`, by `layer_types` or from `max_window_layers` on."""
    num_layers = config.count("num_hidden_layers")
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    first = 0 if config.get("max_window_layers") == 0 else config.count("max_window_layers", 28)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return windows_of(layer_kinds(config, default), config.count("sliding_window", 4096))


def granite(config: ModelConfig) -> Spec:
    """Describe Granite: Llama with multipliers on embeddings, residuals, scores and logits."""
    return base(
        config,
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_multiplier=1 / config.number("logits_scaling", 1.0),
        scale=config.number("attention_multiplier", 1.0),
    )


def phi3(config: ModelConfig) -> Spec:
    """Describe Phi 3: packed qkv and gate_up; LongRoPE, whose original length is outside of the block."""
    names = Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
    block = config.rope_block()
    if (block.get("rope_type") or block.get("type")) == "yarn":  # what first files call LongRoPE
        config = config.replaced(rope_scaling={**block, "rope_type": "longrope"})
    return base(
        config,
        default_positions=4096,
        default_eps=1e-5,
        default_rotary_factor=1.0,
        names=names,
        windows=one_window(config, None),
    )


def smollm3(config: ModelConfig) -> Spec:
    """Describe SmolLM 3: layers with 0 in `no_rope_layers`, or every fourth, do not rotate."""
    num_layers = config.count("num_hidden_layers")
    interval = config.count("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(rotates, list) or len(rotates) != num_layers:
        raise StartupError(f"config.json: `no_rope_layers` must be a list of {num_layers} numbers")
    plain = base(
        config,
        default_kv_heads=4,
        default_positions=32768,
        default_theta=2e6,
        tied=True,
        windows=_smollm3_windows(config, rotates),
    )
    return replace(plain, ropes=tuple(rope if on else None for rope, on in zip(plain.ropes, rotates, strict=True)))


def _smollm3_windows(config: ModelConfig, rotates: list[int]) -> tuple[int | None, ...]:
    if not config.flag("use_sliding_window", False) or config.get("sliding_window") is None:
        return (None,) * len(rotates)
    default = ["full_attention" if on else "sliding_attention" for on in rotates]
    return windows_of(layer_kinds(config, default), config.count("sliding_window"))


def baichuan(config: ModelConfig) -> Spec:
    """Describe Baichuan: packed qkv; version 2 has a head of unit rows; 13B has ALiBi without
    `max_position_embeddings`.
    """
    rotates = config.has("max_position_embeddings")
    config = config.renamed({"max_position_embeddings": ("max_position_embeddings", "model_max_length")})
    differences: dict[str, Any] = {"normalized_head": config.count("vocab_size") == BAICHUAN2_VOCAB}
    if not rotates:
        differences["ropes"] = (None,) * config.count("num_hidden_layers")
        differences["alibi"] = bloom_slopes(config.count("num_attention_heads"))
    return base(config, default_positions=4096, names=Names(qkv=("self_attn.W_pack",)), **differences)


def olmo2(config: ModelConfig) -> Spec:
    """Describe OLMo 2: norms after attention and MLP only, of q and k over all heads."""
    names = Names(
        attention_norm=None,
        attention_post_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_post_norm="post_feedforward_layernorm",
    )
    return base(config, default_eps=1e-5, names=names)


def glm(config: ModelConfig) -> Spec:
    """Describe GLM: half of a head rotates, adjacent pairs; packed gate and up."""
    return _glm(config, Names(up=("mlp.gate_up_proj",)))


def glm4(config: ModelConfig) -> Spec:
    """Describe GLM 4: norms behind attention and MLP too."""
    names = Names(
        up=("mlp.gate_up_proj",),
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )
    return _glm(config, names)


def _glm(config: ModelConfig, names: Names) -> Spec:
    return base(
        config,
        default_head_dim=128,
        default_kv_heads=2,
        default_positions=131072,
        default_eps=1.5625e-7,
        default_rotary_factor=0.5,
        names=names,
        rope_pairs_adjacent=True,
    )
