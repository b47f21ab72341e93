"""Attention over a paged cache without a model around it: the metadata of a step, one layer, its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache, KvShape


def make_metadata(
    tables: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], block_size: int, device: torch.device
) -> AttentionMetadata:
    """A forward over the positions [start, stop) of sequences with these block tables."""
    width = max(-(-stop // block_size) for _, stop in spans)
    padded = torch.zeros(len(tables), width, dtype=torch.int32)
    slots = []
    for row, (table, (start, stop)) in enumerate(zip(tables, spans, strict=True)):
        blocks = torch.tensor(list(table)[:width], dtype=torch.int64)
        padded[row, : len(blocks)] = blocks.int()
        positions = torch.arange(start, stop)
        slots.append(blocks[positions // block_size] * block_size + positions % block_size)
    queries = [stop - start for start, stop in spans]
    ends = [stop for _, stop in spans]
    cumulative = torch.zeros(len(spans) + 1, dtype=torch.int32)
    cumulative[1:] = torch.tensor(queries).cumsum(0)
    return AttentionMetadata(
        slots=torch.cat(slots).to(device),
        block_tables=padded.to(device),
        cu_seqlens_q=cumulative.to(device),
        kv_lengths=torch.tensor(ends, dtype=torch.int32).to(device),
        query_lengths_host=tuple(queries),
        kv_lengths_host=tuple(ends),
    )


def make_layer(num_heads: int, num_kv_heads: int, head_dim: int, **differences: object) -> AttentionLayer:
    """One layer; `differences`: further fields of AttentionLayer."""
    fields = {"index": 0, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    fields |= {"value_dim": head_dim, "scale": head_dim**-0.5}
    return AttentionLayer(**(fields | differences))  # type: ignore[arg-type]


@dataclass(slots=True)
class Scene:
    """One step of one layer: its queries and its own keys and values, the latter already in the cache."""

    layer: AttentionLayer
    cache: KvCache
    metadata: AttentionMetadata
    query: Tensor
    key: Tensor
    value: Tensor

    def attend(self, backend: AttentionBackend) -> Tensor:
        """Planned and run: [num_tokens, num_heads * value_dim]."""
        return backend.start(self.metadata, self.cache).attend(self.layer, self.query, self.key, self.value)


def make_scene(
    layer: AttentionLayer,
    spans: Sequence[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tables: Sequence[Sequence[int]] | None = None,
    num_blocks: int | None = None,
    poison: bool = True,
) -> Scene:
    """Random contents. tables: None, blocks of one sequence scattered among the others'. poison: what no sequence owns
    is NaN, rows of a block behind a sequence's end too."""
    if tables is None:
        tables = scattered([-(-stop // block_size) for _, stop in spans])
    blocks = num_blocks or max(max(t) for t in tables) + 1
    shape = KvShape(layer.num_kv_heads, layer.head_dim, layer.value_dim)
    cache = KvCache((shape,), blocks, block_size, dtype, device)
    rows = cache.rows[0]
    rows.normal_()
    if poison:
        _poison(rows, tables, spans, block_size)
    metadata = make_metadata(tables, spans, block_size, device)
    own = rows.index_select(0, metadata.slots)
    width = layer.num_kv_heads * layer.head_dim
    tokens = len(own)
    query = torch.randn(tokens, layer.num_heads, layer.head_dim, device=device).to(dtype)
    key = own[:, :width].reshape(tokens, layer.num_kv_heads, layer.head_dim)
    value = own[:, width:].reshape(tokens, layer.num_kv_heads, layer.value_dim)
    return Scene(layer, cache, metadata, query, key, value)


def scattered(counts: Sequence[int]) -> list[list[int]]:
    """Tables with so many blocks each, in random order over the cache; block 0 is nobody's."""
    order = (torch.randperm(sum(counts)) + 1).tolist()
    tables = []
    for count in counts:
        tables.append(order[:count])
        order = order[count:]
    return tables


def _poison(rows: Tensor, tables: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], block_size: int) -> None:
    """NaN wherever no position of any sequence lies. Shared blocks count with their longest owner."""
    used = torch.zeros(len(rows), dtype=torch.bool)
    for table, (_, stop) in zip(tables, spans, strict=True):
        positions = torch.arange(stop)
        used[torch.tensor(table)[positions // block_size] * block_size + positions % block_size] = True
    rows[(~used).to(rows.device)] = float("nan")
