"""Llama and its closest kin: RMS norms, rotation, gated MLP."""

from __future__ import annotations

from model_server.models.config import ModelConfig
from model_server.models.families.base import base, layer_kinds, one_window, windows_of
from model_server.models.spec import Spec


def llama(config: ModelConfig) -> Spec:
    """The pattern of all others."""
    return base(config)


def mistral(config: ModelConfig) -> Spec:
    """One window for all layers. A file without the field means 4096, as in transformers; null means none."""
    return base(config, default_positions=131072, windows=one_window(config, 4096))


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
    first = 0 if config.get("max_window_layers") == 0 else config.count("max_window_layers", 28)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return windows_of(layer_kinds(config, default), config.count("sliding_window", 4096))
