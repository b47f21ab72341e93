"""What layers with something else than attention keep of a request, as config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONVOLUTIONS = ("lfm2", "lfm2_moe")
_DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
_KIMI = "kimi_linear"
_JAMBA = "jamba"
_LIGHTNING = "minimax"
_WITHOUT_ATTENTION = ("mamba", "falcon_mamba", "mamba2")
_MAMBA2 = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
# Names and signs of layers with a state, and of those that keep nothing.
_WITH_STATE, _UNCACHED = ("linear_attention", "mamba", "M"), ("mlp", "moe", "-", "E")
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Mixers:
    """Counts of the whole model."""

    layers: int
    """How many layers have such a mixer."""
    uncached: int | None = None
    """How many layers cache no keys; None: these."""
    width: int = 0
    """Tokens that a convolution reads whose inputs are in the KV blocks; 0: there is none."""
    inputs: int = 0
    """Numbers of the model's type that such a layer keeps of each request beside the blocks."""
    grouped_inputs: int = 0
    """The same for each of `groups`, of which each shard has one at least."""
    groups: int = 0
    state: int = 0
    """Numbers in float32 that it keeps there."""

    @property
    def without_keys(self) -> int:
        """How many layers cache no keys and values."""
        return self.layers if self.uncached is None else self.uncached

    def state_bytes(self, num_shard: int, width: int) -> int:
        """Return what one of `num_shard` shards keeps of a request beside its blocks."""
        own = (self.state * _FLOAT32 + self.inputs * width) // num_shard
        return self.layers * (own + self.grouped_inputs * max(1, self.groups // num_shard) * width)

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
    if model_type in _MAMBA2:
        return _mamba2(config)
    if model_type == _JAMBA:
        return _jamba(config)
    if model_type in _WITHOUT_ATTENTION:
        return _alone(config)
    if model_type == _KIMI:
        return _kimi(config)
    if model_type == _LIGHTNING:
        return _lightning(config)
    if model_type not in _DELTA_NETS:
        return None
    kinds, count = config.get("layer_types"), _count(config, "num_hidden_layers", 0)
    interval = max(1, _count(config, "full_attention_interval", 4))
    layers = kinds.count("linear_attention") if isinstance(kinds, list) else count - count // interval
    return _delta_net(config, layers)


def _delta_net(config: Mapping[str, Any], layers: int) -> Mixers:
    """Read the sizes of gated delta nets, of OLMo's by those of its attention."""
    is_olmo, own = config.get("model_type") == "olmo_hybrid", _count(config, "num_attention_heads", 30)
    key_heads = _count(config, "linear_num_key_heads", own if is_olmo else 16)
    key_dim = int(0.75 * _count(config, "hidden_size", 0) / max(1, key_heads)) if is_olmo else 128
    heads = _count(config, "linear_num_value_heads", own if is_olmo else 32)
    key_dim = _count(config, "linear_key_head_dim", key_dim)
    values = heads * _count(config, "linear_value_head_dim", 2 * key_dim if is_olmo else 128)
    inputs = (2 * key_heads * key_dim + values) * (_count(config, "linear_conv_kernel_dim", 4) - 1)
    return Mixers(layers=layers, inputs=inputs, state=values * key_dim)


def _kimi(config: Mapping[str, Any]) -> Mixers:
    """Read the sizes of Kimi's delta attention: heads of equal queries, keys and values."""
    block = config.get("linear_attn_config")
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    names |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
    linear = {ours: config.get(theirs) for ours, theirs in names.items()}
    linear |= block if isinstance(block, dict) else {}
    kinds, full = config.get("layer_types"), linear.get("full_attn_layers")
    num_layers = _count(config, "num_hidden_layers", 0)
    if isinstance(kinds, list):
        layers = kinds.count("linear_attention")
    else:
        layers = num_layers - (len(full) if isinstance(full, list) else max(0, num_layers - 1) // 4)
    heads, dim = _count(linear, "num_heads", 32), _count(linear, "head_dim", 128)
    inputs = 3 * heads * dim * (_count(linear, "short_conv_kernel_size", 4) - 1)
    return Mixers(layers=layers, inputs=inputs, state=heads * dim * dim)


def _lightning(config: Mapping[str, Any]) -> Mixers:
    """Read the sizes of lightning attention: those of the model's heads."""
    kinds, num_layers = config.get("layer_types"), _count(config, "num_hidden_layers", 0)
    layers = kinds.count("linear_attention") if isinstance(kinds, list) else num_layers // 2
    heads = _count(config, "num_attention_heads", 32)
    dim = _count(config, "head_dim", 0) or _count(config, "hidden_size", 0) // max(1, heads)
    return Mixers(layers=layers, state=heads * dim * dim)


def _jamba(config: Mapping[str, Any]) -> Mixers:
    """Read Mamba-1's sizes: channels, with states of `state` times as many numbers."""
    period, offset = max(1, _count(config, "attn_layer_period", 8)), _count(config, "attn_layer_offset", 4)
    channels = _count(config, "mamba_expand", 2) * _count(config, "hidden_size", 0)
    return Mixers(
        layers=sum(index % period != offset for index in range(_count(config, "num_hidden_layers", 0))),
        inputs=channels * (_count(config, "mamba_d_conv", 4) - 1),
        state=channels * _count(config, "mamba_d_state", 16),
    )


def _alone(config: Mapping[str, Any]) -> Mixers:
    """Read the sizes of models of Mamba or Mamba-2 alone."""
    channels = _count(config, "expand", 2) * _count(config, "hidden_size", 0)
    layers, before = _count(config, "num_hidden_layers", 0), _count(config, "conv_kernel", 4) - 1
    if config.get("model_type") != "mamba2":
        channels = _count(config, "intermediate_size", channels)
        return Mixers(layers=layers, inputs=channels * before, state=channels * _count(config, "state_size", 16))
    state = _count(config, "state_size", 128)
    return Mixers(
        layers=layers,
        inputs=channels * before,
        grouped_inputs=2 * state * before,
        groups=_count(config, "n_groups", 8),
        state=channels * state,
    )


def _mamba2(config: Mapping[str, Any]) -> Mixers:
    """Read Mamba-2's sizes: heads of some numbers for each token, with states of `state` times as many."""
    num_layers = _count(config, "num_hidden_layers", 0)
    is_nemotron = config.get("model_type") == "nemotron_h"
    kinds = _kinds(config, num_layers)
    layers = sum(kind in _WITH_STATE for kind in kinds)
    uncached = layers + sum(kind in _UNCACHED for kind in kinds)
    if is_nemotron:
        heads, state = _count(config, "mamba_num_heads", 128), _count(config, "ssm_state_size", 128)
        values = heads * _count(config, "mamba_head_dim", 64)
        groups, width = _count(config, "n_groups", 8), _count(config, "conv_kernel", 4)
    else:
        values = _count(config, "mamba_expand", 2) * _count(config, "hidden_size", 0)
        if config.get("model_type") == "falcon_h1":
            values, layers, uncached = _count(config, "mamba_d_ssm", values), num_layers, 0
        state, groups = _count(config, "mamba_d_state", 256), _count(config, "mamba_n_groups", 1)
        width = _count(config, "mamba_d_conv", 4)
    return Mixers(
        layers=layers,
        uncached=uncached,
        inputs=values * (width - 1),
        grouped_inputs=2 * state * (width - 1),
        groups=groups,
        state=values * state,
    )


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the kind of each layer, by name or by sign."""
    for name in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        value = config.get(name)
        if isinstance(value, list | str):
            return [str(kind) for kind in value]
    attention = config.get("attn_layer_indices")
    attention = attention if isinstance(attention, list) else []
    return ["full_attention" if index in attention else "linear_attention" for index in range(num_layers)]


def _count(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
