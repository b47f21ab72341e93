"""Attention in plain torch over the paged cache: the CPU product, and the truth that kernels are held to.

A query that stands alone (decode) is batched with its like: their K/V rows are gathered by slot, padded to a common
length and masked. A run of queries of one sequence (prefill) is computed on its own, in pieces of bounded size.
Every gathered slot belongs to the sequence itself and has been written (padding repeats the last one), so that no
other sequence's numbers, not even its NaNs, can reach a result. Scores and softmax are float32 inside torch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.attention.metadata import AttentionMetadata
from model_server.kv_cache import KvCache

# Most K and V gathered at once in decode: bounds memory and keeps the gathered rows in a core's cache, from which
# they are read again at once (measured: 1 to 2 MiB best, 8 MiB takes twice as long).
DECODE_CHUNK_BYTES = 2 * 2**20
# Queries per piece of a prefill that has a cached prefix or a window: bounds the mask, skips keys out of reach.
PREFILL_CHUNK_TOKENS = 256


class ReferenceBackend:
    """Runs wherever torch does."""

    name = "reference"
    tgi_name = "paged"
    block_size = 16

    def begin(self, metadata: AttentionMetadata, cache: KvCache) -> ReferenceStep:
        return ReferenceStep(metadata, cache)


@dataclass(frozen=True, slots=True)
class _DecodeChunk:
    """Some single queries, their keys padded to a common length."""

    tokens: slice | Tensor  # rows of the flattened batch: a slice, or [num_rows] int64
    num_rows: int
    slots: Tensor  # [num_rows * length] int64
    mask: Tensor | None  # [num_rows, 1, 1, length], 0 or -inf, in the dtype of the cache; None: all have `length` keys


@dataclass(frozen=True, slots=True)
class _PrefillPiece:
    """Consecutive queries of one sequence and the keys they can see."""

    tokens: slice  # rows of the flattened batch
    slots: Tensor | None  # [num_keys] int64; None: the keys are those of the step at `keys`
    keys: slice  # rows of the flattened batch, if slots is None
    mask: Tensor | None  # [num_queries, num_keys], 0 or -inf; None: plain causal


class ReferenceStep:
    """One forward. Plans are made once per distinct window and shared by the layers."""

    def __init__(self, metadata: AttentionMetadata, cache: KvCache) -> None:
        self._metadata = metadata
        self._cache = cache
        self._plans: dict[int | None, tuple[list[_DecodeChunk], list[_PrefillPiece]]] = {}

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `AttentionStep`."""
        plan = self._plans.get(layer.window)
        if plan is None:
            plan = self._plans[layer.window] = self._plan(layer.window, query.dtype)
        chunks, pieces = plan
        if len(chunks) == 1 and not pieces and type(chunks[0].tokens) is slice:
            return self._decode(layer, chunks[0], query)
        output = query.new_empty(query.shape[0], layer.num_heads * layer.head_dim)
        for chunk in chunks:
            output[chunk.tokens] = self._decode(layer, chunk, query[chunk.tokens])
        for piece in pieces:
            output[piece.tokens] = self._prefill(layer, piece, query, key, value)
        return output

    def _decode(self, layer: AttentionLayer, chunk: _DecodeChunk, query: Tensor) -> Tensor:
        """query: [num_rows, num_heads, head_dim] of the chunk -> [num_rows, num_heads * head_dim].

        The query heads that share a KV head stand where a kernel expects several queries: no repeats are made.
        """
        heads, groups = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        key, value = self._gather(layer, chunk.slots, chunk.num_rows)
        query = query.view(chunk.num_rows, heads, groups, layer.head_dim)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=chunk.mask, scale=layer.scale)
        return output.reshape(chunk.num_rows, layer.num_heads * layer.head_dim)

    def _prefill(
        self, layer: AttentionLayer, piece: _PrefillPiece, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """query, key, value of the whole step -> [num_queries, num_heads * head_dim] of the piece."""
        heads, groups = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        if piece.slots is None:
            keys, values = (t[piece.keys].transpose(0, 1).unsqueeze(0) for t in (key, value))
        else:
            keys, values = self._gather(layer, piece.slots, 1)
        # [n, num_heads, head_dim] -> [num_kv_heads, groups, n, head_dim]; keys are expanded, not copied.
        queries = query[piece.tokens].view(-1, heads, groups, layer.head_dim).permute(1, 2, 0, 3)
        keys, values = (t.transpose(0, 1).expand(heads, groups, -1, -1) for t in (keys, values))
        output = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=piece.mask, is_causal=piece.mask is None, scale=layer.scale
        )
        return output.flatten(0, 1).transpose(0, 1).flatten(1)

    def _gather(self, layer: AttentionLayer, slots: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """K and V at `slots` [num_rows * length] as [num_rows, num_kv_heads, length, dim]."""
        shape = self._cache.shapes[layer.index]
        rows = self._cache.rows[layer.index].index_select(0, slots)
        key_width = shape.num_kv_heads * shape.key_dim
        key = rows[:, :key_width].view(num_rows, -1, shape.num_kv_heads, shape.key_dim)
        value = rows[:, key_width:].view(num_rows, -1, shape.num_kv_heads, shape.value_dim)
        return key.transpose(1, 2), value.transpose(1, 2)

    def _plan(self, window: int | None, dtype: torch.dtype) -> tuple[list[_DecodeChunk], list[_PrefillPiece]]:
        metadata = self._metadata
        if metadata.is_decode:
            return self._decode_chunks(range(len(metadata.kv_lengths_host)), None, window, dtype), []
        singles: list[int] = []
        single_tokens: list[int] = []
        pieces: list[_PrefillPiece] = []
        start = 0
        for sequence, length in enumerate(metadata.query_lengths_host):
            if length == 1:
                singles.append(sequence)
                single_tokens.append(start)
            else:
                pieces.extend(self._prefill_pieces(sequence, start, window, dtype))
            start += length
        return self._decode_chunks(singles, single_tokens, window, dtype), pieces

    def _decode_chunks(
        self, sequences: Sequence[int], tokens: Sequence[int] | None, window: int | None, dtype: torch.dtype
    ) -> list[_DecodeChunk]:
        """Chunks of `sequences`, of similar length each. `tokens`: where their queries stand; None: at the same index.

        Padding costs as much as real keys, so rows are sorted by length unless hardly any would be saved.
        """
        if not sequences:
            return []
        visible = {s: _visible(self._metadata.kv_lengths_host[s], window) for s in sequences}
        order = sequences
        longest = max(visible.values())
        sort = longest * len(sequences) > max(1.25 * sum(visible.values()), 2048)
        if sort:
            order = sorted(sequences, key=lambda s: visible[s])
        token_of = dict(zip(sequences, tokens, strict=True)) if tokens is not None else None
        chunks: list[_DecodeChunk] = []
        row = self._cache.rows[0]
        for rows in _split(order, visible, max_keys=DECODE_CHUNK_BYTES // (row.shape[1] * row.itemsize)):
            places: slice | Tensor
            if token_of is None and not sort:
                places = slice(rows[0], rows[-1] + 1)
            else:
                places = self._index([s if token_of is None else token_of[s] for s in rows])
            chunks.append(self._decode_chunk(rows, places, window, dtype))
        return chunks

    def _decode_chunk(
        self, rows: Sequence[int], places: slice | Tensor, window: int | None, dtype: torch.dtype
    ) -> _DecodeChunk:
        lengths_host = [self._metadata.kv_lengths_host[s] for s in rows]
        length = max(_visible(n, window) for n in lengths_host)
        whole = isinstance(places, slice) and len(rows) == len(self._metadata.kv_lengths_host)
        index = None if whole else self._index(rows)
        tables = self._metadata.block_tables if index is None else self._metadata.block_tables.index_select(0, index)
        lengths = self._metadata.kv_lengths if index is None else self._metadata.kv_lengths.index_select(0, index)
        offsets = self._arange[:length]
        if len(set(lengths_host)) == 1:  # includes a batch of one
            first = lengths_host[0] - length
            slots = self._slots(tables, offsets + first if first else offsets)
            return _DecodeChunk(places, len(rows), slots.flatten(), None)
        lengths = lengths.unsqueeze(1).long()
        positions = (lengths - length).clamp_(min=0) + offsets  # [num_rows, length]
        beyond = positions >= lengths
        slots = self._slots(tables, torch.minimum(positions, lengths - 1))
        mask = torch.zeros(slots.shape, dtype=dtype, device=slots.device).masked_fill_(beyond, -math.inf)
        return _DecodeChunk(places, len(rows), slots.flatten(), mask[:, None, None, :])

    def _prefill_pieces(self, sequence: int, start: int, window: int | None, dtype: torch.dtype) -> list[_PrefillPiece]:
        queries = self._metadata.query_lengths_host[sequence]
        prefix = self._metadata.kv_lengths_host[sequence] - queries
        if prefix == 0 and (window is None or queries <= window):
            tokens = slice(start, start + queries)
            return [_PrefillPiece(tokens, None, tokens, None)]
        pieces = []
        for offset in range(0, queries, PREFILL_CHUNK_TOKENS):
            count = min(PREFILL_CHUNK_TOKENS, queries - offset)
            last = prefix + offset + count  # one past the last key in reach
            first = 0 if window is None else max(0, prefix + offset + 1 - window)
            keys = self._arange[first:last]
            at = self._arange[prefix + offset : last].unsqueeze(1)
            hidden = keys > at
            if window is not None:
                hidden |= keys <= at - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
            tokens = slice(start + offset, start + offset + count)
            if prefix:
                slots = self._slots(self._metadata.block_tables[sequence : sequence + 1], keys).flatten()
                pieces.append(_PrefillPiece(tokens, slots, slice(0), mask))
            else:
                pieces.append(_PrefillPiece(tokens, None, slice(start + first, start + last), mask))
        return pieces

    def _slots(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Slots [num_rows, n] of `positions` ([n] for all rows, or [num_rows, n]) under block tables [num_rows, m]."""
        size = self._cache.block_size
        if positions.dim() == 1:
            blocks = tables.index_select(1, positions // size)
        else:
            blocks = tables.gather(1, positions // size)
        return torch.add(positions % size, blocks, alpha=size)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._metadata.slots.device)

    @cached_property
    def _arange(self) -> Tensor:
        return torch.arange(self._metadata.max_kv_length, device=self._metadata.slots.device)


def _visible(kv_length: int, window: int | None) -> int:
    """How many keys the last position sees."""
    return kv_length if window is None else min(kv_length, window)


def _split(rows: Sequence[int], visible: dict[int, int], max_keys: int) -> list[Sequence[int]]:
    """Cut into runs so that each, padded to its longest row, has at most `max_keys` keys (or is one row)."""
    runs: list[Sequence[int]] = []
    first, longest = 0, 0
    for i, row in enumerate(rows):
        longest = max(longest, visible[row])
        if i > first and longest * (i + 1 - first) > max_keys:
            runs.append(rows[first:i])
            first, longest = i, visible[row]
    runs.append(rows[first:])
    return runs
