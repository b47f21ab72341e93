"""Cohere's Command: attention and MLP in parallel after one LayerNorm, adjacent rotated pairs, tied head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Names, Spec
from model_server.models.families.base import base, layer_kinds, windows_of


def cohere(config: ModelConfig) -> Spec:
    """Describe Command R; the larger has norms of q and k."""
    return _cohere(config, theta=500000.0)


def cohere2(config: ModelConfig) -> Spec:
    """Describe Command R7B: three of four layers have a window and rotate, others neither."""
    num_layers = config.count("num_hidden_layers")
    pattern = config.count("sliding_window_pattern", 4)
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    windows = windows_of(layer_kinds(config, default), config.count("sliding_window", 4096))
    plain = _cohere(config, theta=10000.0, windows=windows)
    return replace(
        plain, ropes=tuple(None if window is None else rope for rope, window in zip(plain.ropes, windows, strict=True))
    )


def _cohere(config: ModelConfig, *, theta: float, **differences: Any) -> Spec:
    return base(
        config.without("rms_norm_eps").renamed({"rms_norm_eps": "layer_norm_eps"}),
        default_eps=1e-5,
        default_positions=8192,
        default_theta=theta,
        tied=True,
        names=Names(mlp_norm=None),
        block="parallel",
        norm="layer",
        rope_pairs_adjacent=True,
        logits_multiplier=config.number("logit_scale", 0.0625),
        **differences,
    )
