"""What a model needs of attention, by the Spec alone."""

from __future__ import annotations

import torch

from model_server.attention.backend import Alibi, AttentionLayer
from model_server.models.decoder.spec import Spec


def attention_layers(spec: Spec) -> tuple[AttentionLayer, ...]:
    """List the undivided model's layers with attention."""
    mixers = [spec.mixer(index) for index in range(spec.num_layers)]
    with_attention = [index for index, mixer in enumerate(mixers) if mixer is None or mixer.has_attention]
    return tuple(attention_layer(spec, index) for index in with_attention)


def attention_layer(spec: Spec, index: int) -> AttentionLayer:
    """Describe layer `index` of the undivided model; sinks are zeros."""
    spec = spec.of_layer(index)
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
