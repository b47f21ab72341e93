"""The families that the native decoder serves: model_type -> how its config becomes a Spec.

To add one: an entry in FAMILIES, a function if `base` does not do, and a line in the parity test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from model_server.errors import StartupError
from model_server.models.config import ModelConfig
from model_server.models.spec import Spec


def base(
    config: ModelConfig, *, default_head_dim: int | None = None, default_positions: int = 2048, **differences: Any
) -> Spec:
    """The fields that all families spell alike, with transformers' defaults; `differences` replace some of them."""
    hidden_size = config.count("hidden_size")
    num_heads = config.count("num_attention_heads")
    num_layers = config.count("num_hidden_layers")
    num_kv_heads = config.count("num_key_value_heads", num_heads)
    head_dim = config.count("head_dim", default_head_dim or max(hidden_size // num_heads, 1))
    max_positions = config.count("max_position_embeddings", default_positions)
    if num_heads % num_kv_heads != 0:
        raise StartupError(
            f"config.json: `num_attention_heads` ({num_heads}) is not a multiple of "
            f"`num_key_value_heads` ({num_kv_heads})"
        )
    if head_dim % 2 != 0:
        raise StartupError(f"config.json: `head_dim` must be even, got {head_dim}")
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": config.count("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": config.count("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "activation": config.text("hidden_act", "silu"),
        "rope": config.rope(head_dim, max_positions),
        "windows": (None,) * num_layers,
        "scale": 1 / math.sqrt(head_dim),
        "tied_head": config.flag("tie_word_embeddings", False),
        "max_positions": max_positions,
    }
    return Spec(**(fields | differences))


def mistral(config: ModelConfig) -> Spec:
    """One window for all layers. A file without the field means 4096, as in transformers; null means none."""
    windowed = config.get("sliding_window") is not None or not config.has("sliding_window")
    window = config.count("sliding_window", 4096) if windowed else None
    windows = (window,) * config.count("num_hidden_layers")
    return base(config, default_positions=131072, windows=windows)


def qwen2(config: ModelConfig) -> Spec:
    """Windows per layer; the biases of q, k and v are found in the checkpoint."""
    return base(config, default_positions=32768, windows=_qwen_windows(config))


def qwen3(config: ModelConfig) -> Spec:
    """Heads of 128 unless the file says otherwise; the per-head norms of q and k are found in the checkpoint."""
    return base(config, default_head_dim=128, default_positions=32768, windows=_qwen_windows(config))


def _qwen_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Only with `use_sliding_window`; on the layers that `layer_types` names, or else from `max_window_layers` on."""
    num_layers = config.count("num_hidden_layers")
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = config.count("sliding_window", 4096)
    types = config.get("layer_types")
    if types is None:
        first = 0 if config.get("max_window_layers") == 0 else config.count("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(t not in _WINDOWED for t in types):
        raise StartupError(f"config.json: `layer_types` must name {num_layers} times one of {', '.join(_WINDOWED)}")
    return tuple(window if _WINDOWED[kind] else None for kind in types)


_WINDOWED = {"full_attention": False, "sliding_attention": True}

FAMILIES: dict[str, Callable[[ModelConfig], Spec]] = {
    "llama": base,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def spec_of(config: ModelConfig) -> Spec:
    """The Spec of a checkpoint. Raises StartupError for a type that is not served, naming those that are."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise StartupError(
            f"Unsupported model type {config.model_type}; this version serves {', '.join(sorted(FAMILIES))}"
        )
    if config.quantization is not None:
        raise StartupError(f"the checkpoint is quantized ({config.quantization}), which this version does not serve")
    return family(config)
