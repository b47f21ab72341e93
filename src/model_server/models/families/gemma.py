"""Gemma: norm weights less one, scaled embeddings, a tied head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, layer_kinds, rotary_dim, windows_of

# Kind of layer -> the field that older files have the base of its rotation in, and what a silent file means.
_THETAS = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}

SANDWICH = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def gemma(config: ModelConfig) -> Spec:
    """Describe Gemma, whose early files say `gelu` for the approximation."""
    given = config.get("hidden_act")
    return _gemma(config.replaced(hidden_activation="gelu_pytorch_tanh" if given == "gelu" else given))


def gemma2(config: ModelConfig) -> Spec:
    """Describe Gemma 2: norms before and after, caps, a window on every second layer."""
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
    """Describe Gemma 3: windows on five of six layers, which rotate by own parameters; norms of q and k."""
    num_layers = config.count("num_hidden_layers")
    pattern = config.count("sliding_window_pattern", 6)
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    kinds = layer_kinds(config, default)
    head_dim = config.count("head_dim", 256)
    positions = config.count("max_position_embeddings", 131072)
    ropes = {kind: config.rope(head_dim, positions, block=block) for kind, block in _rope_blocks(config, kinds).items()}
    return _gemma(
        config,
        default_kv_heads=4,
        default_positions=131072,
        names=SANDWICH,
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=_windows(config, kinds),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        logits_softcap=config.optional_number("final_logit_softcapping"),
    )


def _rope_blocks(config: ModelConfig, kinds: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return rotary parameters by kind of layer; older files' `rope_scaling` is for full layers."""
    given, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or not isinstance(scaling, Mapping):
        raise StartupError("config.json: `rope_parameters` and `rope_scaling` must be objects")
    if strange := sorted(set(given) - set(_THETAS)):
        raise StartupError(
            f"config.json: `rope_parameters` must have an object for each of {', '.join(_THETAS)}, got {strange[0]!r}"
        )
    found: dict[str, Mapping[str, Any]] = {}
    for kind in dict.fromkeys(kinds):
        field, theta = _THETAS[kind]
        own = given.get(kind) or {}
        if not isinstance(own, Mapping):
            raise StartupError(f"config.json: `rope_parameters` of {kind} must be an object, got {own!r:.200}")
        added = scaling if kind == "full_attention" else {}
        found[kind] = {"rope_theta": config.number(field, theta), **own, **added}
        rotary_dim(config.without("partial_rotary_factor"), config.count("head_dim", 256), block=found[kind])
    return found


def _windows(config: ModelConfig, kinds: list[str]) -> tuple[int | None, ...]:
    return windows_of(kinds, config.count("sliding_window", 4096))


def _gemma(config: ModelConfig, *, default_positions: int = 8192, **differences: Any) -> Spec:
    return base(
        config.without("hidden_act").renamed({"hidden_act": "hidden_activation"}),
        default_head_dim=256,
        default_positions=default_positions,
        default_activation="gelu_pytorch_tanh",
        tied=True,
        norm_offset=1.0,
        embedding_multiplier=math.sqrt(config.count("hidden_size")),
        **differences,
    )
