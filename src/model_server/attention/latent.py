"""Latent attention in two forms over one cache of latents, around any other backend.

Absorbed: queries get the width of a latent, and all heads read the cache as it is, for 2 * rank + rotated_dim products
a pair. Expanded: keys and values are made from the latents into a cache of their own, for plain_dim + rotated_dim +
value_dim a pair. `is_expanded` chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model_server.adapters.rows import BASE, AdapterRows, adapter_rows
from model_server.attention.backend import AttentionBackend, AttentionLayer, AttentionStep
from model_server.attention.metadata import AttentionMetadata
from model_server.attention.sparse import SparseStep
from model_server.memory.kv_cache import KvCache, KvShape

# Most bytes of expanded keys and values at once: longer steps are expanded some sequences after others, and longer
# sequences some heads after others. One head of one sequence is always expanded whole.
MAX_EXPANDED_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """This rank's heads; `plain`: unrotated numbers of a key."""

    heads: int
    plain: int
    value: int
    latent: int


class HeadChanges(Protocol):
    """What LoRA adapters make of `LatentHeads`: `models.adapters.heads.AdaptedHeads`."""

    @property
    def rows(self) -> AdapterRows | None: ...

    def scaled(self, plain: Tensor, rows: AdapterRows) -> Tensor: ...

    def absorb(self, plain: Tensor, absorbed: Tensor, rows: AdapterRows) -> None: ...

    def values(self, attended: Tensor, values: Tensor, rows: AdapterRows) -> Tensor: ...

    def expand(self, number: int, latents: Tensor, heads: slice, keys: Tensor, values: Tensor) -> None: ...


class HeadProducts(Protocol):
    """A matrix for each head: `layers.linear.packed.HeadPanels`."""

    def multiply(self, x: Tensor, out: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """Turns latents into keys and values of this rank's heads; `adapters` change it for some rows."""

    up_key: Tensor  # [heads, plain_dim, rank]
    up_value: Tensor  # [heads, rank, value_dim]
    adapters: HeadChanges | None = None
    # The same for absorbed queries and for values by C++ operators, whose results do not depend on other rows.
    panels: tuple[HeadProducts, HeadProducts] | None = None

    @property
    def rows(self) -> AdapterRows | None:
        """Return the adapters of the running step's single queries, if any."""
        return None if self.adapters is None else self.adapters.rows

    def absorb(self, plain: Tensor, absorbed: Tensor, rows: AdapterRows | None) -> None:
        """Write plain query parts [n, heads, plain_dim] into `absorbed` [n, heads, rank]."""
        if self.adapters is not None and rows is not None:
            plain = self.adapters.scaled(plain, rows)
        if self.panels is not None:
            self.panels[0].multiply(plain, absorbed)
        else:
            _multiply(plain.transpose(0, 1), self.up_key, absorbed.transpose(0, 1))
        if self.adapters is not None and rows is not None:
            self.adapters.absorb(plain, absorbed, rows)

    def values(self, attended: Tensor, rows: AdapterRows | None) -> Tensor:
        """Turn sums of latents [n, heads * rank] into [n, heads * value_dim]."""
        heads, rank, _ = self.up_value.shape
        attended = attended.view(-1, heads, rank)
        if self.panels is not None:
            values = attended.new_empty(len(attended), heads, self.up_value.shape[2])
            self.panels[1].multiply(attended, values)
        else:
            values = torch.bmm(attended.transpose(0, 1), self.up_value).transpose(0, 1)
        if self.adapters is not None and rows is not None:
            values = self.adapters.values(attended, values, rows)
        return values.flatten(1)

    def expand(
        self, latents: Tensor, heads: slice, keys: Tensor, values: Tensor, adapters: Sequence[tuple[slice, int]]
    ) -> None:
        """Write latents [n, rank] into keys [n, heads, plain_dim] and values [n, heads, value_dim]."""
        all_heads = latents.expand(keys.shape[1], -1, -1)
        _multiply(all_heads, self.up_key[heads].transpose(1, 2), keys.transpose(0, 1))
        _multiply(all_heads, self.up_value[heads], values.transpose(0, 1))
        for some, number in adapters if self.adapters is not None else ():
            assert self.adapters is not None
            self.adapters.expand(number, latents[some], heads, keys[some], values[some])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentLayer(AttentionLayer):
    """A layer for steps with prompts, whose queries are not absorbed: rotated part, then plain.

    The cached key of all heads is the latent, then the rotated part.
    """

    heads: LatentHeads
    absorbed: AttentionLayer  # the same layer for absorbed queries

    @property
    def rank(self) -> int:
        """Numbers of a latent."""
        return self.absorbed.value_dim

    @property
    def rotated_dim(self) -> int:
        return self.absorbed.head_dim - self.rank


def is_expanded(layer: LatentLayer, queries: int, keys: int) -> bool:
    """Whether `queries`, the last of which sees `keys` keys, are computed in the expanded form."""
    # Multiplications of a head: absorbed, each pair takes 2 * rank + rotated_dim, and each query rank * (plain_dim +
    # value_dim) before and after. Expanded, a pair takes plain_dim + rotated_dim + value_dim, and each key rank *
    # (plain_dim + value_dim). The queries' and their own keys' shares cancel. With DeepSeek V3's sizes prompts without
    # a prefix are expanded, and after a long one those above 170 tokens.
    # With C++ operators one form for all tokens of prompts, so that their bits do not depend on where a prompt is cut.
    # It is the faster one, too, behind a prefix: the cache is packed once for all heads. Without one, 128 tokens take
    # 1.2 times as long in attention, 256 three quarters, 1,024 1.6 times (AMX, DeepSeek V2 Lite's sizes).
    if queries == 1 or layer.heads.panels is not None:
        return False
    prefix = keys - queries
    pairs = queries * prefix + queries * (queries + 1) // 2
    both = layer.head_dim - layer.rotated_dim + layer.value_dim
    return pairs * (2 * layer.rank - both) > prefix * layer.rank * both


class LatentBackend:
    """Wraps a backend to serve `LatentLayer` too."""

    def __init__(self, backend: AttentionBackend, *, is_sparse: bool = False) -> None:
        self._backend = backend
        self.is_sparse = is_sparse  # queries attend to the keys that an indexer chooses

    @property
    def name(self) -> str:
        return self._backend.name

    @property
    def tgi_name(self) -> str:
        return self._backend.tgi_name

    @property
    def block_size(self) -> int:
        return self._backend.block_size

    @property
    def capturable(self) -> bool:
        return self._backend.capturable and not self.is_sparse

    @property
    def sees_ahead(self) -> bool:
        return False

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> LatentStep:
        return LatentStep(self._backend, metadata, cache)


@dataclass(frozen=True, slots=True)
class _Run:
    """Some sequences of a step, as a step of their own."""

    tokens: slice | Tensor  # rows of the flattened batch
    metadata: AttentionMetadata
    step: AttentionStep
    adapters: AdapterRows | None = None  # of its tokens


@dataclass(frozen=True, slots=True)
class _Piece:
    """Sequences expanded together, for as many heads as `expanded` has."""

    run: _Run
    blocks: Tensor  # [n] int64: those of the cache of latents whose tokens the first n of `expanded` hold
    own: slice | Tensor  # the slots in `expanded` of the step's own tokens
    expanded: KvCache
    adapters: tuple[tuple[slice, int], ...]  # numbers of those that some of the first n have


@dataclass(frozen=True, slots=True)
class _Plan:
    """How layers of one size are computed in the step."""

    absorbed: _Run | None
    pieces: tuple[_Piece, ...]


class LatentStep:
    """One forward; all `LatentLayer`s are of one size and share a plan."""

    def __init__(self, backend: AttentionBackend, metadata: AttentionMetadata, cache: KvCache) -> None:
        self._backend = backend
        self._metadata = metadata
        self._cache = cache
        self._device = metadata.slots.device
        self._plan: _Plan | None = None
        self._sparse: SparseStep | None = None

    def sparse(self, top_k: int) -> SparseStep | None:
        """Return what serves queries of more than `top_k` keys; None: there is none."""
        if self._sparse is None and self._metadata.max_kv_length > top_k:
            self._sparse = SparseStep(self._backend, self._metadata, self._cache, top_k)
        return self._sparse

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as the backend; a `LatentLayer` gives [num_tokens, num_heads * value_dim]."""
        if not isinstance(layer, LatentLayer):
            return self._whole.attend(layer, query, key, value)
        if self._plan is None:
            self._plan = self._planned(layer, query.dtype)
        output = query.new_empty(query.shape[0], layer.num_heads * layer.value_dim)
        if self._plan.absorbed is not None:
            tokens = self._plan.absorbed.tokens
            output[tokens] = self._absorbed(layer, self._plan.absorbed, query[tokens], key[tokens])
        for piece in self._plan.pieces:
            self._expanded(layer, piece, query, output)
        return output

    @cached_property
    def _whole(self) -> AttentionStep:
        """Return the step with absorbed queries of all sequences."""
        return self._backend.start(self._metadata, self._cache)

    def _absorbed(self, layer: LatentLayer, run: _Run, query: Tensor, key: Tensor) -> Tensor:
        rank, rotated = layer.rank, layer.rotated_dim
        absorbed = query.new_empty(query.shape[0], layer.num_heads, rank + rotated)
        layer.heads.absorb(query[..., rotated:], absorbed[..., :rank], run.adapters)
        absorbed[..., rank:] = query[..., :rotated]
        attended = run.step.attend(layer.absorbed, absorbed, key, key[..., :rank])
        return layer.heads.values(attended, run.adapters)

    def _expanded(self, layer: LatentLayer, piece: _Piece, query: Tensor, output: Tensor) -> None:
        """Write the piece's rows of `output`."""
        rank, rotated = layer.rank, layer.rotated_dim
        run, expanded = piece.run, piece.expanded
        rows = self._cache.keys[layer.index].index_select(0, piece.blocks).flatten(0, 2)
        keys, values = (t[0].flatten(0, 1)[: len(rows)] for t in (expanded.keys, expanded.values))
        queries = query[run.tokens]
        at_once = expanded.shapes[0].num_kv_heads
        some_heads = dataclasses.replace(
            layer.absorbed,
            index=0,
            num_heads=at_once,
            num_kv_heads=at_once,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
        )
        for first in range(0, layer.num_heads, at_once):
            heads = slice(first, first + at_once)
            keys[..., :rotated] = rows[:, None, rank:]
            layer.heads.expand(rows[:, :rank], heads, keys[..., rotated:], values, piece.adapters)
            attended = run.step.attend(some_heads, queries[:, heads], keys[piece.own], values[piece.own])
            output.view(len(output), layer.num_heads, -1)[run.tokens, heads] = attended.view(len(queries), at_once, -1)

    def _planned(self, layer: LatentLayer, dtype: torch.dtype) -> _Plan:
        metadata = self._metadata
        lengths = list(zip(metadata.query_lengths_host, metadata.kv_lengths_host, strict=True))
        expanded = [i for i, (queries, keys) in enumerate(lengths) if is_expanded(layer, queries, keys)]
        absorbed = sorted(set(range(len(lengths))) - set(expanded))
        run = None
        if not expanded:
            everything = range(len(lengths))
            run = _Run(slice(0, len(metadata.slots)), metadata, self._whole, self._adapters_of(everything))
        elif absorbed:
            run = self._absorbed_run(absorbed)
        token_bytes = (layer.head_dim + layer.value_dim) * dtype.itemsize
        caches: dict[int, KvCache] = {}
        pieces = []
        most = MAX_EXPANDED_BYTES // (token_bytes * self._cache.block_size)  # blocks of one head
        groups = _groups(expanded, [self._num_blocks(i) * layer.num_heads for i in range(len(lengths))], most)
        blocks = [sum(map(self._num_blocks, group)) for group in groups]
        for group, num_blocks in sorted(zip(groups, blocks, strict=True), key=lambda pair: -pair[1]):
            heads = _most_heads(layer.num_heads, most // num_blocks)
            if heads not in caches:  # the largest piece of so many heads comes first
                shape = KvShape(heads, layer.head_dim, layer.value_dim)
                caches[heads] = KvCache((shape,), num_blocks, self._cache.block_size, dtype, self._device)
            pieces.append(self._piece(group, caches[heads]))
        return _Plan(run, tuple(pieces))

    def _num_blocks(self, sequence: int) -> int:
        return -(-self._metadata.kv_lengths_host[sequence] // self._cache.block_size)

    def _absorbed_run(self, sequences: Sequence[int]) -> _Run:
        whole = self._metadata
        index, tokens = self._uploaded(sequences, torch.int64), self._tokens(sequences)
        metadata = AttentionMetadata(
            slots=whole.slots[tokens],
            block_tables=whole.block_tables.index_select(0, index),
            cu_seqlens_q=self._starts(sequences),
            kv_lengths=whole.kv_lengths.index_select(0, index),
            query_lengths_host=tuple(whole.query_lengths_host[i] for i in sequences),
            kv_lengths_host=tuple(whole.kv_lengths_host[i] for i in sequences),
        )
        return _Run(tokens, metadata, self._backend.start(metadata, self._cache), self._adapters_of(sequences))

    def _adapters_of(self, sequences: Sequence[int]) -> AdapterRows | None:
        numbers, lengths = self._metadata.adapters, self._metadata.query_lengths_host
        if numbers is None:
            return None
        rows = np.repeat([numbers[i] for i in sequences], [lengths[i] for i in sequences])
        return adapter_rows(rows, None, self._device)

    def _piece(self, sequences: Sequence[int], expanded: KvCache) -> _Piece:
        """Lay the sequences' blocks one after another in `expanded`."""
        whole, size = self._metadata, self._cache.block_size
        counts = [self._num_blocks(i) for i in sequences]
        firsts = list(accumulate(counts, initial=0))
        queries = tuple(whole.query_lengths_host[i] for i in sequences)
        lengths = tuple(whole.kv_lengths_host[i] for i in sequences)
        tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
        slots: list[int] = []
        for row, (first, count) in enumerate(zip(firsts, counts, strict=False)):
            tables[row, :count] = torch.arange(first, first + count)
            end = first * size + lengths[row]
            slots.extend(range(end - queries[row], end))
        metadata = AttentionMetadata(
            slots=self._uploaded(slots, torch.int64),
            block_tables=self._on_device(tables),
            cu_seqlens_q=self._starts(sequences),
            kv_lengths=self._uploaded(lengths, torch.int32),
            query_lengths_host=queries,
            kv_lengths_host=lengths,
        )
        blocks = torch.cat([whole.block_tables[i, :count] for i, count in zip(sequences, counts, strict=True)])
        run = _Run(self._tokens(sequences), metadata, self._backend.start(metadata, expanded))
        own = slice(slots[0], slots[-1] + 1) if len(slots) == slots[-1] + 1 - slots[0] else metadata.slots
        adapters = tuple(
            (slice(first * size, (first + count) * size), whole.adapters[i])
            for i, first, count in zip(sequences, firsts, counts, strict=False)
            if whole.adapters is not None and whole.adapters[i] != BASE
        )
        return _Piece(run, blocks.long(), own, expanded, adapters)

    def _tokens(self, sequences: Sequence[int]) -> slice | Tensor:
        """Return where the queries are: a slice if adjacent."""
        lengths = self._metadata.query_lengths_host
        starts = list(accumulate(lengths, initial=0))
        if sequences[-1] - sequences[0] + 1 == len(sequences):
            return slice(starts[sequences[0]], starts[sequences[-1] + 1])
        return self._uploaded([t for i in sequences for t in range(starts[i], starts[i + 1])], torch.int64)

    def _starts(self, sequences: Sequence[int]) -> Tensor:
        """cu_seqlens_q of these sequences alone."""
        lengths = self._metadata.query_lengths_host
        return self._uploaded(list(accumulate((lengths[i] for i in sequences), initial=0)), torch.int32)

    def _uploaded(self, numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._on_device(torch.tensor(numbers, dtype=dtype))

    def _on_device(self, tensor: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Run `torch.bmm` into parts of wider rows, on a CPU by a tensor of its own, which is faster."""
    if out.device.type == "cpu":
        out.copy_(torch.bmm(left, right))
    else:
        torch.bmm(left, right, out=out)


def _groups(sequences: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Cut `sequences` into runs of at most `most`, or single ones."""
    groups: list[list[int]] = []
    total = 0
    for sequence in sequences:
        if not groups or total + sizes[sequence] > most:
            groups.append([])
            total = 0
        groups[-1].append(sequence)
        total += sizes[sequence]
    return groups


def _most_heads(num_heads: int, most: int) -> int:
    """Return the largest divisor of `num_heads` up to `most`."""
    return next((n for n in range(min(num_heads, most), 1, -1) if num_heads % n == 0), 1)
