"""Attention in plain torch over the paged cache: the reference for kernels.

Single queries are batched: rows gathered by slot, padded with the last and masked. Prompts are computed in pieces of
bounded size. Only slots of the sequence itself are read, so that no other's NaNs reach it. Softmax is float32. A float8
cache is read in the query's type, the step's own keys too: a prompt gives the same in one step or several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.attention.backend import Alibi, AttentionLayer, DistanceBias
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import FLOAT8, KvCache, from_float8

# Most K and V gathered at once in decode: bounds memory and keeps the gathered rows in a core's cache, from which
# they are read again at once (measured: 1 to 2 MiB best, 8 MiB takes twice as long).
DECODE_CHUNK_BYTES = 2 * 2**20
# Queries per piece of a prefill that needs a mask: bounds the mask and the scores, skips keys out of reach.
PREFILL_CHUNK_TOKENS = 256


class ReferenceBackend:
    """Runs wherever torch does."""

    name = "reference"
    tgi_name = "paged"
    block_size = 16
    capturable = False  # rows are grouped by their lengths on the host
    sees_ahead = True

    def __init__(self, *, exact: bool = True) -> None:
        # Single queries have as many keys as the host says, not up to as many.
        self.exact = exact

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> ReferenceStep:
        return ReferenceStep(metadata, cache, self.exact)


@dataclass(frozen=True, slots=True)
class _Reach:
    """The keys that a query sees; layers of equal reach share a plan."""

    window: int | None
    chunk: int | None
    biased: bool  # masks are made even where all keys are seen, and distances beside them
    unfused: bool  # scores are written out: pieces must be small
    exact: bool  # of single queries: as in `ReferenceBackend`

    def first(self, position: int) -> int:
        if self.window is not None:
            return max(0, position + 1 - self.window)
        return 0 if self.chunk is None else position - position % self.chunk

    def firsts(self, positions: Tensor) -> Tensor:
        """Return `first` for many positions, on the device."""
        if self.window is not None:
            return (positions + (1 - self.window)).clamp_(min=0)
        return torch.zeros_like(positions) if self.chunk is None else positions - positions % self.chunk

    def visible(self, kv_length: int) -> int:
        """Bound the keys that the last of `kv_length` positions sees."""
        return min(kv_length, self.chunk) if self.chunk and not self.exact else kv_length - self.first(kv_length - 1)


@dataclass(frozen=True, slots=True)
class _Keys:
    """What beyond causality decides about keys; both [queries or rows, num_keys]."""

    mask: Tensor | None  # 0 or -inf, in the dtype of the cache
    positions: Tensor | None  # int64, if the layer is biased
    distances: Tensor | None  # key position - query position, -inf where hidden; float32, if the layer is biased


@dataclass(frozen=True, slots=True)
class _DecodeChunk:
    """Single queries with keys padded to a common length."""

    tokens: slice | Tensor  # rows of the flattened batch: a slice, or [num_rows] int64
    num_rows: int
    slots: Tensor  # [num_rows * length] int64
    keys: _Keys


@dataclass(frozen=True, slots=True)
class _PrefillPiece:
    """Consecutive queries of one sequence, and the keys they see."""

    tokens: slice  # rows of the flattened batch
    slots: Tensor | None  # [num_keys] int64; None: the keys are those of the step at `at`
    at: slice  # rows of the flattened batch, if slots is None
    keys: _Keys  # without a mask: plain causal


_Plan = tuple[list[_DecodeChunk], list[_PrefillPiece]]


class ReferenceStep:
    """One forward, with a plan for each distinct reach."""

    def __init__(self, metadata: AttentionMetadata, cache: KvCache, exact: bool = True) -> None:
        self._metadata, self._cache, self._exact = metadata, cache, exact
        self._float8 = any(rows.dtype in FLOAT8 for rows in cache.rows)
        self._plans: dict[tuple[int | None, int | None, bool, bool], _Plan] = {}
        # By the ids of keys and biases, kept alive.
        self._biases: dict[tuple[int, int], tuple[Alibi | DistanceBias, Tensor]] = {}

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = self._attend(layer, query, key, value)
        return output if layer.value_scale == 1.0 else output.mul_(layer.value_scale)

    def _attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to values as stored."""
        unfused = layer.softcap is not None or layer.sinks is not None
        reach = (layer.window, layer.chunk, (layer.alibi or layer.distance_bias) is not None, unfused)
        plan = self._plans.get(reach)
        if plan is None:
            plan = self._plans[reach] = self._plan(_Reach(*reach, self._exact), query.dtype)
        chunks, pieces = plan
        if len(chunks) == 1 and not pieces and type(chunks[0].tokens) is slice:
            return self._decode(layer, chunks[0], query)
        output = query.new_empty(query.shape[0], layer.num_heads * layer.value_dim)
        for chunk in chunks:
            output[chunk.tokens] = self._decode(layer, chunk, query[chunk.tokens])
        for piece in pieces:
            output[piece.tokens] = self._prefill(layer, piece, query, key, value)
        return output

    def _decode(self, layer: AttentionLayer, chunk: _DecodeChunk, query: Tensor) -> Tensor:
        """Compute [num_rows, num_heads * value_dim] of a chunk; query heads of a KV head act as several queries."""
        heads, groups = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        key, value = self._gather(layer, chunk.slots, chunk.num_rows, query.dtype)
        query = query.view(chunk.num_rows, heads, groups, layer.head_dim)
        mask = chunk.keys.mask
        if bias := layer.alibi or layer.distance_bias:
            mask = self._bias(bias, chunk.keys, query.dtype, (1, heads, groups, 1))
        elif mask is not None:
            mask = mask[:, None, None, :]
        if layer.softcap is not None or layer.sinks is not None:
            sinks = None if layer.sinks is None else layer.sinks.view(1, heads, groups, 1)
            output = _attend_written_out(layer, query, key, value, mask, sinks)
        else:
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.stored_scale)
        if layer.value_dim != layer.head_dim:
            output = output[..., : layer.value_dim]
        return output.reshape(chunk.num_rows, layer.num_heads * layer.value_dim)

    def _prefill(
        self, layer: AttentionLayer, piece: _PrefillPiece, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Compute [num_queries, num_heads * value_dim] of a piece."""
        heads, groups = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        if piece.slots is None:
            if self._cache.shapes[layer.index].value_in_key:
                value = key
            keys, values = (t[piece.at].transpose(0, 1).unsqueeze(0) for t in (key, value))
        else:
            keys, values = self._gather(layer, piece.slots, 1, query.dtype)
        if values.shape[-1] < keys.shape[-1]:
            # torch's kernel wants both of one width, or it writes all scores out.
            values = F.pad(values, (0, keys.shape[-1] - values.shape[-1]))
        # [n, num_heads, head_dim] -> [num_kv_heads, groups, n, head_dim]; keys are expanded, not copied.
        queries = query[piece.tokens].view(-1, heads, groups, layer.head_dim).permute(1, 2, 0, 3)
        keys, values = (t.transpose(0, 1).expand(heads, groups, -1, -1) for t in (keys, values))
        mask = piece.keys.mask
        if bias := layer.alibi or layer.distance_bias:
            mask = self._bias(bias, piece.keys, query.dtype, (heads, groups, 1, 1))
        if layer.softcap is not None or layer.sinks is not None:
            sinks = None if layer.sinks is None else layer.sinks.view(heads, groups, 1, 1)
            output = _attend_written_out(layer, queries, keys, values, mask, sinks)
        else:
            output = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=layer.stored_scale
            )
        if layer.value_dim != layer.head_dim:
            output = output[..., : layer.value_dim]
        return output.flatten(0, 1).transpose(0, 1).flatten(1)

    def _bias(
        self, source: Alibi | DistanceBias, keys: _Keys, dtype: torch.dtype, shape: tuple[int, int, int, int]
    ) -> Tensor:
        """Join bias and mask, once for layers with equal ones.

        Args:
            shape: Of the heads beside the scores, [1, num_kv_heads, groups, 1] or [num_kv_heads, groups, 1, 1].
        """
        index = (id(keys), id(source))
        found = self._biases.get(index)
        if found is None:
            assert keys.distances is not None
            assert keys.positions is not None
            rows = keys.positions.dim() == 2  # single queries, each with keys of its own
            distances, positions = (t[:, None, None, :] if rows else t for t in (keys.distances, keys.positions))
            if isinstance(source, DistanceBias):
                bias = _looked_up(source.table, distances, shape)
            elif source.bfloat16_scale is None:
                bias = source.slopes.view(shape) * distances
            else:
                rounded = (source.slopes.view(shape).bfloat16() * positions).float() * source.bfloat16_scale
                bias = rounded.masked_fill(distances == -math.inf, -math.inf)
            found = self._biases[index] = (source, bias.to(dtype))
        return found[1]

    def _gather(self, layer: AttentionLayer, slots: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gather K and V at `slots` as [num_rows, num_kv_heads, length, dim], unscaled.

        Values inside of keys come with the whole key: torch's kernel wants equal widths. The surplus is cut off the
        result.
        """
        shape = self._cache.shapes[layer.index]
        rows = self._cache.rows[layer.index].index_select(0, slots)
        if rows.dtype in FLOAT8:
            rows = from_float8(rows, dtype)
        key_width = shape.num_kv_heads * shape.key_dim
        key = rows[:, :key_width].view(num_rows, -1, shape.num_kv_heads, shape.key_dim).transpose(1, 2)
        if shape.value_in_key:
            return key, key
        value = rows[:, key_width : shape.attended_width].view(num_rows, -1, shape.num_kv_heads, shape.value_dim)
        return key, value.transpose(1, 2)

    def _plan(self, reach: _Reach, dtype: torch.dtype) -> _Plan:
        metadata = self._metadata
        if metadata.is_decode:
            return self._decode_chunks(range(len(metadata.kv_lengths_host)), None, reach, dtype), []
        singles: list[int] = []
        single_tokens: list[int] = []
        pieces: list[_PrefillPiece] = []
        start = 0
        for sequence, length in enumerate(metadata.query_lengths_host):
            if length == 1:
                singles.append(sequence)
                single_tokens.append(start)
            else:
                pieces.extend(self._prefill_pieces(sequence, start, reach, dtype))
            start += length
        return self._decode_chunks(singles, single_tokens, reach, dtype), pieces

    def _decode_chunks(
        self, sequences: Sequence[int], tokens: Sequence[int] | None, reach: _Reach, dtype: torch.dtype
    ) -> list[_DecodeChunk]:
        """Split sequences into chunks of similar length, sorted unless little padding is saved.

        Args:
            tokens: Where their queries are; None: at the same index.
        """
        if not sequences:
            return []
        visible = {s: reach.visible(self._metadata.kv_lengths_host[s]) for s in sequences}
        order = sequences
        longest = max(visible.values())
        sort = longest * len(sequences) > max(1.25 * sum(visible.values()), 2048)
        if sort:
            order = sorted(sequences, key=lambda s: visible[s])
        token_of = dict(zip(sequences, tokens, strict=True)) if tokens is not None else None
        chunks: list[_DecodeChunk] = []
        row_bytes = max(shape.row_width for shape in self._cache.shapes if shape.newest is None) * dtype.itemsize
        for rows in _split(order, visible, max_keys=DECODE_CHUNK_BYTES // row_bytes):
            places: slice | Tensor
            if token_of is None and not sort:
                places = slice(rows[0], rows[-1] + 1)
            else:
                places = self._index([s if token_of is None else token_of[s] for s in rows])
            chunks.append(self._decode_chunk(rows, places, reach, dtype))
        return chunks

    def _decode_chunk(
        self, rows: Sequence[int], places: slice | Tensor, reach: _Reach, dtype: torch.dtype
    ) -> _DecodeChunk:
        lengths_host = [self._metadata.kv_lengths_host[s] for s in rows]
        length = max(reach.visible(n) for n in lengths_host)
        whole = isinstance(places, slice) and len(rows) == len(self._metadata.kv_lengths_host)
        index = None if whole else self._index(rows)
        tables = self._metadata.block_tables if index is None else self._metadata.block_tables.index_select(0, index)
        lengths = self._metadata.kv_lengths if index is None else self._metadata.kv_lengths.index_select(0, index)
        offsets = self._arange[:length]
        if reach.exact and len(set(lengths_host)) == 1:  # includes a batch of one
            first = lengths_host[0] - length
            positions = offsets + first if first else offsets
            keys = _Keys(None, None, None)
            if reach.biased:
                at = positions.unsqueeze(0)
                keys = _Keys(None, at, (at - (lengths_host[0] - 1)).float())
            return _DecodeChunk(places, len(rows), self._slots(tables, positions).flatten(), keys)
        lengths = lengths.unsqueeze(1).long()
        positions = reach.firsts(lengths - 1) + offsets  # [num_rows, length], padded after the last key of a row
        beyond = positions >= lengths
        slots = self._slots(tables, torch.minimum(positions, lengths - 1))
        return _DecodeChunk(
            places, len(rows), slots.flatten(), self._keys(beyond, positions, lengths - 1, reach, dtype)
        )

    def _prefill_pieces(self, sequence: int, start: int, reach: _Reach, dtype: torch.dtype) -> list[_PrefillPiece]:
        queries = self._metadata.query_lengths_host[sequence]
        length = self._metadata.kv_lengths_host[sequence]
        prefix = length - queries
        ahead = self._metadata.last_keys is not None
        if prefix == 0 and not ahead and not reach.biased and reach.first(queries - 1) == 0 and not reach.unfused:
            tokens, slots = slice(start, start + queries), None
            if self._float8:
                slots = self._slots_of(sequence, self._arange[:queries])
            return [_PrefillPiece(tokens, slots, tokens, _Keys(None, None, None))]
        pieces = []
        for offset in range(0, queries, PREFILL_CHUNK_TOKENS):
            count = min(PREFILL_CHUNK_TOKENS, queries - offset)
            tokens = slice(start + offset, start + offset + count)
            at = self._arange[prefix + offset : prefix + offset + count].unsqueeze(1)
            last = length if ahead else prefix + offset + count  # one past the last key in reach
            first = 0 if ahead else reach.first(prefix + offset)
            positions = self._arange[first:last]
            keys = self._keys(self._hidden(tokens, positions, at, reach), positions, at, reach, dtype)
            if prefix or self._float8:
                pieces.append(_PrefillPiece(tokens, self._slots_of(sequence, positions), slice(0), keys))
            else:
                pieces.append(_PrefillPiece(tokens, None, slice(start + first, start + last), keys))
        return pieces

    def _hidden(self, tokens: slice, positions: Tensor, at: Tensor, reach: _Reach) -> Tensor:
        """Mark the keys at `positions` that queries do not see: [n, num_keys] bool."""
        metadata = self._metadata
        hidden = positions > (at if metadata.last_keys is None else metadata.last_keys[tokens].unsqueeze(1))
        if reach.window is not None:
            before = positions <= at - reach.window
            if metadata.first_keys is not None:
                firsts = metadata.first_keys[tokens].unsqueeze(1)
                before &= (firsts < 0) | (positions < firsts)
            hidden |= before
        elif reach.chunk is not None:
            hidden |= positions < at - at % reach.chunk
        return hidden

    def _keys(self, hidden: Tensor, positions: Tensor, at: Tensor, reach: _Reach, dtype: torch.dtype) -> _Keys:
        """Make the mask from hidden [n, num_keys] bool and the positions."""
        if reach.biased:
            distances = (positions - at).float().masked_fill_(hidden, -math.inf)
            return _Keys(None, positions, distances)
        return _Keys(
            torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf), None, None
        )

    def _slots_of(self, sequence: int, positions: Tensor) -> Tensor:
        return self._slots(self._metadata.block_tables[sequence : sequence + 1], positions).flatten()

    def _slots(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Return slots [num_rows, n] of `positions` under block tables [num_rows, m]."""
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


def _looked_up(table: Tensor, distances: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return biases of distances [rows, 1, 1, keys] or [queries, keys] (-inf: hidden), with heads as in `shape`."""
    hidden = distances == -math.inf
    back = distances.neg().masked_fill_(hidden, 0).clamp_(0, table.shape[1] - 1).long()
    found = table.index_select(1, back.flatten()).view(table.shape[0], *back.shape)
    if len(distances.shape) == 4:
        found = found.squeeze(2).transpose(0, 1).reshape(-1, *shape[1:], back.shape[-1]).squeeze(3)
        return found.masked_fill(hidden, -math.inf)
    return found.view(*shape[:2], *back.shape).masked_fill(hidden, -math.inf)


def _attend_written_out(
    layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attend with softcap or sinks, in float32; query, key, value are [a, b, n, dim]."""
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)).mul_(layer.stored_scale)
    if layer.softcap is not None:
        scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    if mask is not None:
        scores.add_(mask)
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        weights = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


def _split(rows: Sequence[int], visible: dict[int, int], max_keys: int) -> list[Sequence[int]]:
    """Cut rows into runs of at most `max_keys` padded keys, or single ones."""
    runs: list[Sequence[int]] = []
    first, longest = 0, 0
    for i, row in enumerate(rows):
        longest = max(longest, visible[row])
        if i > first and longest * (i + 1 - first) > max_keys:
            runs.append(rows[first:i])
            first, longest = i, visible[row]
    runs.append(rows[first:])
    return runs
