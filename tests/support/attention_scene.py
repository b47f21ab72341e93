"""Attention written out in float64, one query at a time, and scenes to try backends on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from parity.protocol import CPU, attention_metadata
from torch import Tensor

from model_server.attention.backend import Alibi, AttentionBackend, AttentionLayer
from model_server.attention.metadata import AttentionMetadata
from model_server.attention.reference import ReferenceBackend
from model_server.memory.kv_cache import KvCache, KvShape

# (query tokens, tokens in all) of each sequence.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one decode row": [(1, 9)],
    "first token": [(1, 1)],
    "decode, equal lengths": [(1, 7), (1, 7), (1, 7)],
    "decode, ragged": [(1, 1), (1, 16), (1, 17), (1, 40), (1, 5)],
    "one prompt": [(13, 13)],
    "prompts": [(9, 9), (2, 2), (20, 20)],
    "chunk on a prefix": [(6, 30), (4, 5)],
    "everything mixed": [(1, 12), (7, 7), (1, 1), (5, 33), (1, 33)],
}
HEADS = {"plain": (4, 4), "grouped": (4, 2), "one key head": (4, 1)}


def naive_bias(alibi: Alibi, head: int, keys: Tensor, position: int) -> Tensor:
    if alibi.bfloat16_scale is None:
        return alibi.slopes[head].double() * (keys - position)
    return (alibi.slopes[head].bfloat16() * keys).double() * alibi.bfloat16_scale


def naive(
    layer: AttentionLayer,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    batch: list[tuple[int, int]],
    ahead: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Tensor:
    """float64, straight from the definition: softmax(softcap(q k scale) + bias, sink) v over the visible positions.

    ahead: last and first keys of the rows, as in `AttentionMetadata`.
    """
    rows, row = [], 0
    for (count, total), key, value in zip(batch, keys, values, strict=True):
        for position in range(total - count, total):
            first = 0 if layer.window is None else max(0, position + 1 - layer.window)
            first = first if layer.chunk is None else position - position % layer.chunk
            last = position if ahead is None else ahead[0][row]
            first = first if ahead is None or layer.window is None or ahead[1][row] < 0 else min(first, ahead[1][row])
            heads = []
            for head in range(layer.num_heads):
                kv = head // (layer.num_heads // layer.num_kv_heads)
                scores = key[first : last + 1, kv].double() @ query[row, head].double() * layer.scale
                if layer.softcap is not None:
                    scores = layer.softcap * (scores / layer.softcap).tanh()
                if layer.distance_bias is not None:
                    biases = layer.distance_bias.table[head].double()
                    scores = scores + biases[(position - torch.arange(first, last + 1)).clamp(0, len(biases) - 1)]
                if layer.alibi is not None:
                    scores = scores + naive_bias(layer.alibi, head, torch.arange(first, last + 1), position)
                if layer.sinks is not None:
                    scores = torch.cat((scores, layer.sinks[head : head + 1].double()))
                weights = scores.softmax(0)[: last + 1 - first]
                heads.append(weights @ value[first : last + 1, kv].double())
            rows.append(torch.cat(heads))
            row += 1
    return torch.stack(rows)


class Scene:
    """Random queries, keys and values of a batch, and a cache full of `unwritten` wherever nothing was written.

    Numbers are drawn on the CPU, the same on every device; `keys` and `values` stay there.
    """

    def __init__(
        self,
        batch: list[tuple[int, int]],
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        value_dim: int | None = None,
        *,
        dim: int = 16,
        device: torch.device = CPU,
        unwritten: float = math.nan,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        value_dim = dim if value_dim is None else value_dim
        counts = [-(-total // block_size) for _, total in batch]
        blocks = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        tables = [[blocks.pop() for _ in range(n)] for n in counts]
        self.batch = batch
        self.ahead: tuple[list[int], list[int]] | None = None
        self.metadata: AttentionMetadata = attention_metadata(
            tables, [(t - q, t) for q, t in batch], block_size, device
        )
        self.cache = KvCache((KvShape(num_kv_heads, dim, value_dim),), sum(counts) + 1, block_size, dtype, device)
        self.cache.rows[0].fill_(unwritten)
        everything = attention_metadata(tables, [(0, t) for _, t in batch], block_size)
        total = sum(t for _, t in batch)
        key, value = (
            torch.randn(total, num_kv_heads, width, generator=generator).to(dtype) for width in (dim, value_dim)
        )
        self.cache.write(0, everything.slots.to(device), key.to(device), value.to(device))
        self.keys, self.values = (t.split([n for _, n in batch]) for t in (key, value))
        query = torch.randn(sum(q for q, _ in batch), num_heads, dim, generator=generator)
        self.query = query.to(device, dtype)
        self.new_key, self.new_value = (
            torch.cat([t[n - q :] for t, (q, n) in zip(part, batch, strict=True)]).to(device)
            for part in (self.keys, self.values)
        )

    def layer(self, window: int | None = None, scale: float = 0.25, **options: Any) -> AttentionLayer:
        return AttentionLayer(
            index=0,
            num_heads=self.query.shape[1],
            num_kv_heads=self.keys[0].shape[1],
            head_dim=self.query.shape[2],
            value_dim=self.values[0].shape[2],
            scale=scale,
            window=window,
            **options,
        )

    def attend(self, layer: AttentionLayer, backend: AttentionBackend | None = None) -> Tensor:
        """By the reference unless another backend is given."""
        step = (backend or ReferenceBackend()).start(self.metadata, self.cache)
        return step.attend(layer, self.query, self.new_key, self.new_value)

    def expected(self, layer: AttentionLayer) -> Tensor:
        """On the CPU in float64, whatever the device; slopes and sinks of the layer must be there."""
        return naive(layer, self.query.cpu(), self.keys, self.values, self.batch, self.ahead)

    def see_ahead(self, *spans: tuple[int, int, int], whole: Sequence[int] = (), past_windows: bool = False) -> None:
        """spans: (sequence, first token, behind its last) whose tokens see each other both ways, windows or not if
        `past_windows`. whole: sequences of which all tokens see all of them, windows or not."""
        device = self.metadata.slots.device
        last, first = [], []
        for sequence, (count, total) in enumerate(self.batch):
            for position in range(total - count, total):
                around = [(start, stop) for s, start, stop in spans if s == sequence and start <= position < stop]
                last.append(total - 1 if sequence in whole else max((b - 1 for _, b in around), default=position))
                begin = max((a for a, _ in around), default=-1) if past_windows else -1
                first.append(0 if sequence in whole else begin)
        self.ahead = last, first
        lasts, firsts = (torch.tensor(one, dtype=torch.int64, device=device) for one in self.ahead)
        self.metadata = dataclasses.replace(self.metadata, last_keys=lasts, first_keys=firsts)
