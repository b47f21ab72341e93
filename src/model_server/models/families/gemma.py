"""Gemma: norm weights stored less one, embeddings times the root of their width, a tied head."""

from __future__ import annotations

import math
from typing import Any

from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, layer_kinds, rotary_dim, windows_of

SANDWICH = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def gemma(config: ModelConfig) -> Spec:
    """The first Gemma. Its early files say `gelu` and mean the approximation."""
    if config.get("hidden_activation") is None and config.get("hidden_act") == "gelu":
        config = config.renamed({}, hidden_activation="gelu_pytorch_tanh")
    return _gemma(config)


def gemma2(config: ModelConfig) -> Spec:
    """Norms before and after attention and MLP, caps on scores and logits, a window on every second layer."""
    kinds = [("full_attention", "sliding_attention")[(i + 1) % 2] for i in range(config.count("num_hidden_layers"))]
    return _gemma(
        config,
        default_kv_heads=4,
        names=SANDWICH,
        windows=_windows(config, layer_kinds(config, kinds)),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=config.optional_number("attn_logit_softcapping", 50.0),
        logits_softcap=config.optional_number("final_logit_softcapping", 30.0),
    )


def gemma3_text(config: ModelConfig) -> Spec:
    """Windows on five of six layers, which rotate by parameters of their own; norms of q and k."""
    num_layers = config.count("num_hidden_layers")
    pattern = config.count("sliding_window_pattern", 6)
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    kinds = layer_kinds(config, default)
    head_dim = config.count("head_dim", 256)
    positions = config.count("max_position_embeddings", 131072)
    blocks = config.get("rope_parameters")
    if isinstance(blocks, dict) and isinstance(blocks.get("full_attention"), dict):
        ropes = {
            kind: config.rope(
                rotary_dim(config, head_dim, block=blocks[kind]), positions, theta=theta, block=blocks[kind]
            )
            for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))
            if kind in kinds
        }
    else:
        local = ModelConfig({"rope_theta": config.number("rope_local_base_freq", 1e4)})
        ropes = {
            "full_attention": config.rope(head_dim, positions, theta=1e6),
            "sliding_attention": local.rope(head_dim, positions),
        }
    return _gemma(
        config,
        default_kv_heads=4,
        default_positions=131072,
        names=SANDWICH,
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=_windows(config, kinds),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=config.optional_number("attn_logit_softcapping"),
        logits_softcap=config.optional_number("final_logit_softcapping"),
    )


def _windows(config: ModelConfig, kinds: list[str]) -> tuple[int | None, ...]:
    return windows_of(kinds, config.count("sliding_window", 4096))


def _gemma(config: ModelConfig, *, default_positions: int = 8192, **differences: Any) -> Spec:
    return base(
        config.renamed({"hidden_act": ("hidden_activation", "hidden_act")}),
        default_head_dim=256,
        default_positions=default_positions,
        default_activation="gelu_pytorch_tanh",
        tied=True,
        norm_offset=1.0,
        embedding_multiplier=math.sqrt(config.count("hidden_size")),
        **differences,
    )
