"""Which layers keep keys or latents, and how wide, where config.json gives them names or sizes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wire.indexers import full_indexers

# Types whose attention is sparse, and the heads of an indexer where config.json does not say them.
_INDEX_HEADS = {"deepseek_v32": 64, "glm_moe_dsa": 32}
_TYPES = ("gemma4_text", "gemma4_unified_text")
_FULL = "full_attention"


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of DeepSeek's attention."""

    # Of the latent of a token's keys and values; `queries`: of its query's, 0 without one. `rotated` is shared by all
    # heads' keys, `plain` and `value` are each head's.
    keys: int
    queries: int
    rotated: int
    plain: int
    value: int
    # How many layers have an indexer, where attention is sparse, and its heads.
    indexers: int = 0
    index_heads: int = 0
    index_dim: int = 0

    def cached(self, num_layers: int) -> int:
        """Count the numbers cached for a token by so many layers."""
        return num_layers * (self.keys + self.rotated) + self.indexers * self.index_dim


def key_layers_in(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """Return KV heads and width of each layer of a config.json that has keys of its own; None: all are alike."""
    if config.get("is_encoder_decoder"):
        return _of_decoder(config)
    count = config.get("num_hidden_layers")
    if config.get("model_type") not in _TYPES or not isinstance(count, int):
        return None
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != count:
        kinds = ["sliding_attention" if (index + 1) % 6 else _FULL for index in range(count)]
    kinds = [*kinds[:-1], _FULL]
    heads, width = _count(config, "num_key_value_heads", 4), _count(config, "head_dim", 256)
    full_heads = _count(config, "num_global_key_value_heads", heads) if config.get("attention_k_eq_v") else heads
    full = (full_heads, _count(config, "global_head_dim", 512))
    written = config.get("per_layer_config")
    sizes = (
        {int(index): own for index, own in written.items() if index.isdecimal()} if isinstance(written, dict) else None
    )
    found = []
    for index, kind in enumerate(kinds[: count - _count(config, "num_kv_shared_layers", 0)]):
        if sizes is None:
            found.append(full if kind == _FULL else (heads, width))
        else:
            own = sizes.get(index)
            own = own if isinstance(own, dict) else {}
            found.append((_count(own, "num_key_value_heads", heads), _count(own, "head_dim", width)))
    return tuple(found)


def latent_in(config: Mapping[str, Any]) -> LatentAttention | None:
    """Return the sizes of a config.json with latent attention."""
    keys, rotated = _count(config, "kv_lora_rank", 0), _count(config, "qk_rope_head_dim", -1)
    if not keys or rotated < 0:
        return None
    return LatentAttention(
        keys=keys,
        queries=_count(config, "q_lora_rank", 0) or (0 if "q_lora_rank" in config else 1536),
        rotated=rotated,
        plain=_count(config, "qk_nope_head_dim", 0) or 128,
        value=_count(config, "v_head_dim", 0) or 128,
        **_indexers(config),
    )


def _indexers(config: Mapping[str, Any]) -> dict[str, int]:
    heads, layers = _INDEX_HEADS.get(str(config.get("model_type"))), _count(config, "num_hidden_layers", 0)
    if heads is None or not layers:
        return {}
    return {
        "indexers": sum(full_indexers(config.get, layers) or ()),
        "index_heads": _count(config, "index_n_heads", heads),
        "index_dim": _count(config, "index_head_dim", 128),
    }


def _of_decoder(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """Return those of an encoder-decoder's decoder, by T5's, BART's and T5Gemma's names."""
    inner = config.get("decoder")
    config = inner if isinstance(inner, dict) else config

    def first(*names: str) -> int:
        return next((found for name in names if (found := _count(config, name, 0))), 0)

    layers = first("decoder_layers", "num_decoder_layers", "num_hidden_layers", "num_layers")
    heads = first("decoder_attention_heads", "num_attention_heads", "num_heads")
    width = first("d_kv", "head_dim") or first("d_model", "hidden_size") // max(heads, 1)
    if not (layers and heads and width):
        return None
    return ((first("num_key_value_heads") or heads, width),) * layers


def _count(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
