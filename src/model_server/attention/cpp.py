"""Attention by the C++ operators, all sequences and heads in one call on the paged cache; the rest goes to the
reference.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.attention.metadata import AttentionMetadata
from model_server.attention.reference import ReferenceBackend, ReferenceStep
from model_server.cpp.library import TYPES, prepared, usable
from model_server.cpp.structs import AttentionShapeStruct, PagingStruct
from model_server.memory.kv_cache import KvCache, KvShape

# Types of a cache that are read beside the query's own, by their numbers in attention.hpp.
STORED = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


class CppBackend:
    """For what `cpp.library.usable` serves."""

    name = "cpp"
    tgi_name = "paged"
    capturable = False  # it runs on CPUs
    sees_ahead = True
    block_size = 16

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> CppStep:
        return CppStep(metadata, cache)


class CppStep:
    """One forward."""

    def __init__(self, metadata: AttentionMetadata, cache: KvCache) -> None:
        self._metadata = metadata
        self._cache = cache
        self.paging = paging_struct(metadata, cache)
        self._address = ctypes.byref(self.paging)
        self._operators = prepared()
        self._reference: ReferenceStep | None = None

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = self._cache.shapes[layer.index]
        rows = self._cache.rows[layer.index]
        stored = STORED.get(rows.dtype, 0)
        if not serves(layer, shape) or query.dtype not in TYPES or (rows.dtype != query.dtype and not stored):
            if self._reference is None:
                self._reference = ReferenceBackend().start(self._metadata, self._cache)
            return self._reference.attend(layer, query, key, value)
        if query.stride(2) != 1 or query.stride(1) != layer.head_dim:
            query = query.contiguous()
        out = query.new_empty(query.shape[0], layer.num_heads * layer.value_dim)
        self._operators.cpp_attend(
            TYPES[query.dtype],
            shape_struct(layer, shape, stored),
            self._address,
            rows.data_ptr(),
            query.data_ptr(),
            query.stride(0),
            out.data_ptr(),
        )
        return out if layer.value_scale == 1.0 else out.mul_(layer.value_scale)


def available(device: torch.device) -> bool:
    """Whether `CppBackend` can serve on this device."""
    return usable(device, torch.float32)


def serves(layer: AttentionLayer, shape: KvShape) -> bool:
    """Whether the C++ operators know all that the layer needs."""
    if layer.distance_bias is not None:
        return False
    return (layer.alibi is None or layer.alibi.bfloat16_scale is None) and shape.key_dim % 2 == 0


def shape_struct(layer: AttentionLayer, shape: KvShape, stored: int = 0) -> AttentionShapeStruct:
    """Describe the layer; its tensors must outlive the struct.

    Args:
        stored: One of STORED, 0 for the query's type.
    """
    return AttentionShapeStruct(
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        key_dim=layer.head_dim,
        value_dim=layer.value_dim,
        value_offset=0 if shape.value_in_key else shape.num_kv_heads * shape.key_dim,
        row_width=shape.row_width,
        window=layer.window or 0,
        chunk=layer.chunk or 0,
        scale=layer.stored_scale,
        softcap=layer.softcap or 0.0,
        slopes=None if layer.alibi is None else layer.alibi.slopes.data_ptr(),
        sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
        stored=stored,
    )


def paging_struct(metadata: AttentionMetadata, cache: KvCache) -> PagingStruct:
    """Describe where the step's keys are; the metadata must outlive the struct."""
    tables = metadata.block_tables
    assert tables.is_contiguous() and tables.dtype == torch.int32
    return PagingStruct(
        tables=tables.data_ptr(),
        lengths=metadata.kv_lengths.data_ptr(),
        starts=metadata.cu_seqlens_q.data_ptr(),
        sequences=len(metadata.query_lengths_host),
        max_blocks=tables.shape[1],
        block_size=cache.block_size,
        last_keys=None if metadata.last_keys is None else metadata.last_keys.data_ptr(),
        first_keys=None if metadata.first_keys is None else metadata.first_keys.data_ptr(),
        single_prompts=None if metadata.single_prompts is None else metadata.single_prompts.ctypes.data,
    )
