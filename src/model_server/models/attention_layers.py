"""What a model asks of attention, known from its config: before weights are read, and on no rank in particular."""

from __future__ import annotations

from pathlib import Path

import torch

from model_server.attention.backend import Alibi, AttentionLayer
from model_server.models.config import ModelConfig
from model_server.models.families import UnknownFamilyError, spec_of
from model_server.models.spec import Spec


def attention_layers_of(model_dir: Path) -> tuple[AttentionLayer, ...]:
    """Of the model in `model_dir`; empty if only a run of it can tell (families that transformers computes).

    Raises StartupError for a config that is not usable.
    """
    try:
        spec = spec_of(ModelConfig.read(model_dir))
    except UnknownFamilyError:
        return ()
    return tuple(attention_layer(spec, index) for index in range(spec.num_layers))


def attention_layer(spec: Spec, index: int) -> AttentionLayer:
    """Layer `index` of the undivided model. Slopes and sinks are there if the layer has them; sinks are zeros."""
    kv_heads, key_dim, value_dim = spec.num_kv_heads, spec.head_dim, spec.head_dim
    if spec.attention is not None:
        kv_heads, key_dim, value_dim = spec.attention.cached(spec)
    return AttentionLayer(
        index=index,
        num_heads=spec.num_heads,
        num_kv_heads=kv_heads,
        head_dim=key_dim,
        value_dim=value_dim,
        scale=spec.scale / (index + 1) if spec.scale_by_inverse_layer else spec.scale,
        window=spec.windows[index],
        chunk=spec.chunks[index] if spec.chunks else None,
        softcap=spec.softcap,
        alibi=None if spec.alibi is None else Alibi(torch.tensor(spec.alibi), spec.alibi_bfloat16_scale),
        sinks=None if spec.names.sinks is None else torch.zeros(spec.num_heads),
    )
