"""Batches over a paged cache for the attention kernels, and what attention is by its definition, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from support.triton_interpreter import mend
from torch import Tensor

from model_server.attention.backend import Alibi, AttentionLayer, AttentionStep
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache, KvShape

mend()

# Slopes and sinks for up to 32 heads; bfloat16 can hold hardly any of them.
SLOPES = torch.tensor([0.31 * 0.8**i for i in range(32)])
SINKS = torch.tensor([1.5 * math.cos(i) for i in range(32)])


class Scene:
    """Random queries, keys and values of a batch, and a cache that is NaN wherever nothing was written.

    batch: (query tokens, tokens in all) of each sequence. Blocks are handed out at random, the tables are wider than
    need be. shared: that many first blocks of all sequences are the same, with the same contents.
    """

    def __init__(
        self,
        batch: Sequence[tuple[int, int]],
        device: torch.device,
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 16,
        value_dim: int | None = None,
        value_in_key: bool = False,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        shared: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        value_dim = dim if value_dim is None else value_dim
        self.batch = list(batch)
        self.shape = KvShape(heads[1], dim, value_dim, value_in_key)
        counts = [-(-total // page) for _, total in batch]
        blocks = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
        common = [blocks.pop() for _ in range(shared)]
        tables = [(common + [blocks.pop() for _ in range(n)])[:n] for n in counts]
        self.tables = torch.zeros(len(batch), max(counts) + 3, dtype=torch.int32)
        for row, table in zip(self.tables, tables, strict=True):
            row[: len(table)] = torch.tensor(table, dtype=torch.int32)
        num_blocks = sum(counts) + 3
        self.cache = KvCache((self.shape,), num_blocks, page, cache_dtype or dtype, device)
        stored = torch.full((num_blocks * page, self.shape.row_width), math.nan)
        for table, (_, total) in zip(tables, batch, strict=True):
            slots = torch.tensor(table, dtype=torch.int64).repeat_interleave(page) * page + torch.arange(page).repeat(
                len(table)
            )
            fresh = stored[slots[:total], :1].isnan().any(1)
            rows = torch.randn(total, self.shape.row_width, generator=generator)
            stored[slots[:total][fresh]] = rows[fresh]
        self.cache.rows[0].copy_(stored.to(self.cache.rows[0].dtype))
        lengths, kv_lengths = [q for q, _ in batch], [n for _, n in batch]
        slots = torch.cat(
            [
                row[torch.arange(total - count, total) // page].long() * page
                + torch.arange(total - count, total) % page
                for row, (count, total) in zip(self.tables, batch, strict=True)
            ]
        )
        self.metadata = AttentionMetadata(
            slots=slots.to(device),
            block_tables=self.tables.to(device),
            cu_seqlens_q=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32).to(device),
            kv_lengths=torch.tensor(kv_lengths, dtype=torch.int32).to(device),
            query_lengths_host=tuple(lengths),
            kv_lengths_host=tuple(kv_lengths),
        )
        # Queries lie between keys and values, as after the fused product.
        packed = torch.randn(sum(lengths), heads[0] + heads[1], dim, generator=generator).to(device, dtype)
        self.query = packed[:, : heads[0]]
        self.layer_constants = {
            "index": 0,
            "num_heads": heads[0],
            "num_kv_heads": heads[1],
            "head_dim": dim,
            "value_dim": value_dim,
        }

    def layer(self, **options: Any) -> AttentionLayer:
        """Options as in `AttentionLayer`; slopes and sinks are moved to the device of the scene."""
        device = self.query.device
        for name in ("sinks", "alibi"):
            if isinstance(options.get(name), Tensor):
                options[name] = options[name].to(device)
            elif isinstance(options.get(name), Alibi):
                options[name] = Alibi(options[name].slopes.to(device), options[name].bfloat16_scale)
        return AttentionLayer(**self.layer_constants, **{"scale": 0.25, **options})

    def attend(self, step: AttentionStep, layer: AttentionLayer) -> Tensor:
        """With the step's own keys and values, as a model would call it."""
        slots = self.metadata.slots
        key, value = (
            t.flatten(0, 1).index_select(0, slots) for t in (self.cache.keys[0].float(), self.cache.values[0].float())
        )
        return step.attend(layer, self.query, key.to(self.query.dtype), value.to(self.query.dtype))

    def expected(self, layer: AttentionLayer) -> Tensor:
        """[num_tokens, num_heads * value_dim] float64 on the CPU, straight from the definition."""
        page = self.cache.block_size
        keys, values = (t.flatten(0, 1).cpu().double() for t in (self.cache.keys[0], self.cache.values[0]))
        queries = self.query.cpu().double().split([count for count, _ in self.batch])
        rows = []
        for table, query, (count, total) in zip(self.tables, queries, self.batch, strict=True):
            if total == 0:
                rows.append(torch.zeros(count, layer.num_heads, layer.value_dim, dtype=torch.float64))
                continue
            at = torch.arange(total)
            slots = table[at // page].long() * page + at % page
            rows.append(defined(layer, query, keys[slots] * layer.key_scale, values[slots] * layer.value_scale))
        return torch.cat(rows).flatten(1)


def defined(layer: AttentionLayer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last `len(query)` of `len(keys)` positions attend: float64 [n, num_heads, value_dim].

    query: [n, num_heads, head_dim]; keys: [total, num_kv_heads, head_dim]; values: alike with value_dim.
    """
    total, count = len(keys), len(query)
    group = layer.num_heads // layer.num_kv_heads
    keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
    at, positions = torch.arange(total), torch.arange(total - count, total)[:, None]
    scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    if layer.alibi is not None:
        slopes = layer.alibi.slopes.cpu()[:, None, None]
        if layer.alibi.bfloat16_scale is None:
            scores += slopes.double() * (at - positions)
        else:
            scores += (slopes.bfloat16() * at).double() * layer.alibi.bfloat16_scale
    hidden = at > positions
    if layer.window is not None:
        hidden |= at <= positions - layer.window
    if layer.chunk is not None:
        hidden |= at < positions - positions % layer.chunk
    scores = scores.masked_fill(hidden, -math.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.cpu().double()[:, None, None].expand(-1, count, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    # Keys that no query sees may hold anything.
    values = values.masked_fill(hidden.all(0)[:, None, None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights, values)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; NaN never passes a comparison."""
    difference = actual.cpu().double() - expected
    return float(difference.norm() / expected.norm())
