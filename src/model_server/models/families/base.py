"""What the configs of most families spell alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from model_server.errors import StartupError
from model_server.layers.temperature import QueryTemperature
from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Spec

BLANK_IDS = "blank_ids"
"""The field that has `Spec.blank_ids` in the config of a vision model's text, and in no file."""


class UnknownFamilyError(StartupError):
    """The native decoder does not know this type, or not in this form; another runner may."""


def base(
    config: ModelConfig,
    *,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
    default_positions: int = 2048,
    default_eps: float = 1e-6,
    default_activation: str = "silu",
    default_theta: float = 10000.0,
    default_rotary_factor: float | None = None,
    tied: bool = False,
    **differences: Any,
) -> Spec:
    """Read the fields that families share, with the given defaults; `differences` replace some.

    Args:
        default_rotary_factor: None: all of a head always rotates.
        tied: Without `tie_word_embeddings`.
    """
    hidden_size = config.count("hidden_size")
    num_heads = config.count("num_attention_heads")
    num_layers = config.count("num_hidden_layers")
    silent = not config.has("num_key_value_heads")  # null means one per query head
    num_kv_heads = config.count("num_key_value_heads", default_kv_heads if silent and default_kv_heads else num_heads)
    head_dim = config.count("head_dim", default_head_dim or max(hidden_size // num_heads, 1))
    max_positions = config.count("max_position_embeddings", default_positions)
    if num_heads % num_kv_heads != 0:
        raise StartupError(
            f"config.json: `{config.named('num_attention_heads')}` ({num_heads}) is not a multiple of "
            f"`{config.named('num_key_value_heads')}` ({num_kv_heads})"
        )
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": config.count("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", default_eps),
        "activation": config.text("hidden_act", default_activation),
        "windows": (None,) * num_layers,
        "scale": 1 / math.sqrt(head_dim),
        "tied_head": config.flag("tie_word_embeddings", tied),
        "max_positions": max_positions,
    }
    if "intermediate_size" not in differences:
        fields["intermediate_size"] = config.count("intermediate_size")
    if "ropes" not in differences:
        dim = rotary_dim(config, head_dim, default_rotary_factor)
        fields["ropes"] = (config.rope(dim, max_positions, theta=default_theta),) * num_layers
    return Spec(**(fields | differences))


def rotary_dim(
    config: ModelConfig, head_dim: int, default_factor: float | None = None, block: Mapping[str, Any] | None = None
) -> int:
    """Return how many numbers of a head rotate.

    Args:
        default_factor: None: always all.
    """
    block = config.rope_block() if block is None else block
    factor = block.get("partial_rotary_factor")
    factors = ModelConfig({"partial_rotary_factor": config.get("partial_rotary_factor") if factor is None else factor})
    dim = int(head_dim * factors.number("partial_rotary_factor", default_factor or 1.0))
    if default_factor is None and dim != head_dim:
        raise StartupError(
            f"config.json: `partial_rotary_factor` makes {dim} of {head_dim} numbers of a head rotate, but heads of "
            f"{config.get('model_type')} rotate as a whole: remove it"
        )
    if dim % 2 != 0 or not 0 < dim <= head_dim:
        raise StartupError(f"config.json: the rotated part of `head_dim` must be even, got {dim} of {head_dim}")
    return dim


def layer_kinds(config: ModelConfig, default: list[str], served: tuple[str, ...] = ()) -> list[str]:
    """Return `layer_types`, or `default`, if all are served."""
    kinds = served or ("full_attention", "sliding_attention")
    types = config.get("layer_types")
    types = default if types is None else types
    num_layers = config.count("num_hidden_layers")
    if not isinstance(types, list) or len(types) != num_layers or any(t not in kinds for t in types):
        name = config.named("layer_types")
        raise StartupError(f"config.json: `{name}` must name {num_layers} times one of {', '.join(kinds)}")
    return types


def windows_of(kinds: list[str], window: int) -> tuple[int | None, ...]:
    """`window` for the layers of kind sliding_attention."""
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def sharpening(config: ModelConfig) -> QueryTemperature | None:
    """Return how queries sharpen (`llama_4_scaling_beta`), from the length of texts before rotations were scaled on."""
    name = "original_max_position_embeddings"
    block = ModelConfig(config.rope_block())
    beta = block.optional_number("llama_4_scaling_beta")
    if beta is None:
        return None
    # Outside of the block it counts first, as for the rotations.
    length = config.count(name) if config.get(name) is not None else block.count(name)
    return QueryTemperature(beta, length, offset=0)


def one_window(config: ModelConfig, default: int | None) -> tuple[int | None, ...]:
    """Give all layers the same window: `default` if absent, none if null."""
    window = config.count("sliding_window") if config.get("sliding_window") is not None else None
    if not config.has("sliding_window"):
        window = default
    return (window,) * config.count("num_hidden_layers")
