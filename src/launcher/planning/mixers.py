"""What layers with something else than attention keep of a request, as config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONVOLUTIONS = ("lfm2", "lfm2_moe")
_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Mixers:
    """Counts of the whole model."""

    layers: int
    """How many layers have no attention."""
    width: int = 0
    """Tokens that a convolution reads whose inputs are in the KV blocks; 0: there is none."""
    inputs: int = 0
    """Numbers of the model's type that such a layer keeps of each request beside the blocks."""
    state: int = 0
    """Numbers in float32 that it keeps there."""

    def state_bytes(self, num_shard: int, width: int) -> int:
        """Return what one of `num_shard` shards keeps of a request beside its blocks."""
        return self.layers * (self.state * _FLOAT32 + self.inputs * width) // num_shard

    def block_bytes(self, hidden_size: int, num_shard: int, width: int, num_drafted: int, block: int) -> int:
        """Return what one of `num_shard` shards keeps in a block of `block` tokens.

        Args:
            num_drafted: Length of the longest draft, whose inputs are kept too.
        """
        if not self.width:
            return 0
        rows = min(self.width + num_drafted if num_drafted else self.width - 1, block)
        return self.layers * rows * (hidden_size // num_shard) * width


def mixers_in(config: Mapping[str, Any]) -> Mixers | None:
    """Return those of a config.json; None: all layers have attention, or the family is not known."""
    model_type = config.get("model_type")
    if model_type in _CONVOLUTIONS:
        kinds, attention = config.get("layer_types"), config.get("full_attn_idxs")
        layers = 0
        if isinstance(kinds, list):
            layers = kinds.count("conv")
        elif isinstance(attention, list):
            layers = _count(config, "num_hidden_layers", 0) - len(attention)
        return Mixers(layers=layers, width=_count(config, "conv_L_cache", 3))
    if model_type not in _DELTA_NETS:
        return None
    kinds, count = config.get("layer_types"), _count(config, "num_hidden_layers", 0)
    interval = max(1, _count(config, "full_attention_interval", 4))
    layers = kinds.count("linear_attention") if isinstance(kinds, list) else count - count // interval
    heads, key_dim = _count(config, "linear_num_value_heads", 32), _count(config, "linear_key_head_dim", 128)
    values = heads * _count(config, "linear_value_head_dim", 128)
    channels = 2 * _count(config, "linear_num_key_heads", 16) * key_dim + values
    return Mixers(
        layers=layers, inputs=channels * (_count(config, "linear_conv_kernel_dim", 4) - 1), state=values * key_dim
    )


def _count(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
