"""Attention by `torch.nn.attention.varlen.varlen_attn`, where it reads pages.

It wraps flash-attention 2: pages of a multiple of 256 tokens, 16-bit floats. Cumulated key lengths are given beside the
used ones, as torch's `test_varlen_attention.py` says.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model_server.attention.availability import UnavailableError, require_ampere
from model_server.attention.backend import AttentionLayer
from model_server.attention.flash_attn import cumulative, refusal
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache

# 2.10 has the function without pages, 2.12 with them.
NEEDED = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table")


class TorchVarlenBackend:
    """One call per layer, decode and prefill alike."""

    name = "torch_varlen"
    tgi_name = "flashdecoding"
    block_size = 256
    capturable = True  # decode takes lengths and pages from the device, and its bounds follow from shapes
    sees_ahead = False

    def __init__(self, varlen_attn: Callable[..., Any]) -> None:
        self._varlen_attn = varlen_attn

    def refuses(self, layer: AttentionLayer) -> str | None:
        """Say, after its name in a sentence, why it cannot serve `layer`."""
        common = refusal(layer)
        if common is not None:
            return common
        if layer.softcap is not None:
            return "has no soft cap"
        if layer.alibi is not None:
            return "has no ALiBi"
        return None

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> TorchVarlenStep:
        return TorchVarlenStep(self._varlen_attn, metadata, cache)


class TorchVarlenStep:
    """One forward."""

    def __init__(self, varlen_attn: Callable[..., Any], metadata: AttentionMetadata, cache: KvCache) -> None:
        self._varlen_attn = varlen_attn
        self._metadata = metadata
        self._cache = cache
        self._cu_seq_k = cumulative(metadata.kv_lengths)
        # A bound is enough beside `seqused_k`, and one that depends only on shapes can be captured in a CUDA graph.
        self._max_k = metadata.block_tables.shape[1] * cache.block_size

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the cache, which has the step's own keys too."""
        metadata = self._metadata
        output: Tensor = self._varlen_attn(
            query,
            self._cache.keys[layer.index],
            self._cache.values[layer.index],
            metadata.cu_seqlens_q,
            self._cu_seq_k,
            metadata.max_query_length,
            self._max_k,
            scale=layer.scale,
            # Causal is spelled as a window here: all keys before, none after.
            window_size=(-1 if layer.window is None else layer.window - 1, 0),
            enable_gqa=layer.num_heads != layer.num_kv_heads,
            seqused_k=metadata.kv_lengths,
            block_table=metadata.block_tables,
        )
        return output.reshape(query.shape[0], layer.num_heads * layer.value_dim)


def available(device: torch.device, dtype: torch.dtype) -> TorchVarlenBackend:
    """Return the backend if this torch has it and it reads pages."""
    require_ampere(device, dtype)
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        raise UnavailableError(f"torch {torch.__version__} has no variable-length attention") from None
    missing = [name for name in NEEDED if name not in inspect.signature(module.varlen_attn).parameters]
    if missing:
        raise UnavailableError(f"the variable-length attention of torch {torch.__version__} lacks {', '.join(missing)}")
    return TorchVarlenBackend(module.varlen_attn)
