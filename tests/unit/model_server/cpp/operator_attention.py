"""Attention over a paged cache that holds NaN wherever no query of the step may look."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from support.cpp_operators import AS, TOLERANCE, Operators, address, assert_near, exact, rows_apart, widen

from model_server.cpp.structs import AttentionShapeStruct, PagingStruct

NO_BLOCK = 2**30  # of which nothing can be read


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float8_e4m3fn: no infinities, all bits set are NaN."""
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    size[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -size, size)


def e5m2(codes: np.ndarray) -> np.ndarray:
    """The upper half of a float16."""
    return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float64)


# What bytes of a cache stand for, by the number that the operators have for the type.
FLOAT8 = {1: e4m3, 2: e5m2}
_NAN, _MOST_BITS = 0x7F, 0x48  # a NaN of both types, and how large a code of theirs may be: 4 and 8


@dataclass
class Layer:
    """The constants of a layer; 0 or None: it has no such thing."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    is_value_in_key: bool = False
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    slopes: np.ndarray | None = None
    sinks: np.ndarray | None = None
    stored: int = 0  # of the cache: 0: the query's type, else a key of FLOAT8

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.key_dim)

    @property
    def value_offset(self) -> int:
        return 0 if self.is_value_in_key else self.kv_heads * self.key_dim

    @property
    def row_width(self) -> int:
        return self.kv_heads * (self.key_dim + (0 if self.is_value_in_key else self.value_dim))

    def struct(self) -> AttentionShapeStruct:
        return AttentionShapeStruct(
            self.heads,
            self.kv_heads,
            self.key_dim,
            self.value_dim,
            self.value_offset,
            self.row_width,
            self.window,
            self.chunk,
            self.scale,
            self.softcap,
            address(self.slopes),
            address(self.sinks),
            self.stored,
        )

    def first_visible(self, position: int) -> int:
        if self.window:
            return max(0, position + 1 - self.window)
        return position - position % self.chunk if self.chunk else 0


class Paging:
    """Sequences of (queries, keys) in blocks of random places; the cache ends with the last key of its last block."""

    def __init__(self, random: np.random.Generator, batch: list[tuple[int, int]], block_size: int) -> None:
        self.batch = batch
        self.block_size = block_size
        counts = [math.ceil(keys / block_size) for _, keys in batch]
        places = random.permutation(sum(counts))
        self.tables = exact(np.full((len(batch), max(1, *counts)), NO_BLOCK, np.int32))
        for table, count in zip(self.tables, counts, strict=True):
            table[:count], places = places[:count], places[count:]
        self.lengths = exact(np.array([keys for _, keys in batch], np.int32))
        self.starts = exact(np.cumsum([0, *(queries for queries, _ in batch)]).astype(np.int32))
        self.tokens = int(self.starts[-1])
        # Whether single queries are computed as those of longer chunks.
        self.single_prompts = exact(random.integers(0, 2, len(batch)).astype(np.uint8))
        self.cache_rows = 1 + max(int(self.slots(s, 0, keys).max()) for s, (_, keys) in enumerate(batch) if keys)

    def slots(self, sequence: int, first: int, last: int) -> np.ndarray:
        """Rows of the cache that hold keys [first, last)."""
        keys = np.arange(first, last)
        return (
            self.tables[sequence, keys // self.block_size].astype(np.int64) * self.block_size + keys % self.block_size
        )

    def new_slots(self) -> np.ndarray:
        """Where this step's tokens are written."""
        return np.concatenate([self.slots(s, keys - queries, keys) for s, (queries, keys) in enumerate(self.batch)])

    def struct(self) -> PagingStruct:
        return PagingStruct(
            address(self.tables),
            address(self.lengths),
            address(self.starts),
            len(self.batch),
            self.tables.shape[1],
            self.block_size,
            single_prompts=address(self.single_prompts),
        )


def filled_cache(random: np.random.Generator, paging: Paging, layers: list[Layer], type: int) -> np.ndarray:
    """[rows, width]: random where a query of the step looks, for any of the layers; else NaN. Of bytes for a layer that
    stores them."""
    stored = layers[0].stored
    cache = np.full((paging.cache_rows, layers[0].row_width), np.nan, np.float32)
    codes = np.full(cache.shape, _NAN, np.uint8)
    for sequence, (queries, keys) in enumerate(paging.batch):
        if queries:
            first = min(layer.first_visible(keys - queries) for layer in layers)
            slots = paging.slots(sequence, first, keys)
            shape = len(slots), cache.shape[1]
            if stored:
                codes[slots] = random.integers(0, _MOST_BITS, shape) | random.integers(0, 2, shape) << 7
            else:
                cache[slots] = random.standard_normal(shape)
    return exact(codes if stored else AS[type](cache), True)


def attention(layer: Layer, paging: Paging, cache: np.ndarray, query: np.ndarray) -> np.ndarray:
    """query [tokens, heads * key_dim] -> [tokens, heads * value_dim], both float64."""
    out = np.empty((len(query), layer.heads, layer.value_dim))
    group = layer.heads // layer.kv_heads
    for sequence, (queries, keys) in enumerate(paging.batch):
        if not queries:
            continue
        positions = np.arange(keys - queries, keys)
        first = layer.first_visible(keys - queries)
        rows = cache[paging.slots(sequence, first, keys)]
        distance = np.arange(first, keys) - positions[:, None]
        lowest = np.array([layer.first_visible(p) for p in positions]) - positions
        start = paging.starts[sequence]
        for head in range(layer.heads):
            kv_head = head // group
            k = rows[:, kv_head * layer.key_dim :][:, : layer.key_dim]
            width = layer.key_dim if layer.is_value_in_key else layer.value_dim
            v = rows[:, layer.value_offset + kv_head * width :][:, : layer.value_dim]
            q = query[start : start + queries, head * layer.key_dim : (head + 1) * layer.key_dim]
            s = q @ k.T * layer.scale
            if layer.softcap:
                s = np.tanh(s / layer.softcap) * layer.softcap
            if layer.slopes is not None:
                s = s + layer.slopes[head] * distance
            s = np.where((distance <= 0) & (distance >= lowest[:, None]), s, -np.inf)
            sink = -np.inf if layer.sinks is None else float(layer.sinks[head])
            peak = np.maximum(s.max(1, keepdims=True), sink)
            weights = np.exp(s - peak)
            out[start : start + queries, head] = weights @ v / (weights.sum(1, keepdims=True) + np.exp(sink - peak))
    return out.reshape(len(query), -1)


def rotated(
    qkv: np.ndarray, heads: int, dim: int, turns: np.ndarray | None, norm: np.ndarray | None, eps: float
) -> np.ndarray:
    """The first `heads` heads of each row normed and turned, the rest as it was."""
    out = qkv.copy()
    x = out[:, : heads * dim].reshape(len(qkv), heads, dim)
    if norm is not None:
        x *= norm / np.sqrt((x**2).mean(2, keepdims=True) + eps)
    if turns is not None:
        part = x[:, :, : turns.shape[1]]
        a, b = part[:, :, 0::2].copy(), part[:, :, 1::2].copy()
        cosine, sine = turns[:, None, 0::2], turns[:, None, 1::2]
        part[:, :, 0::2], part[:, :, 1::2] = a * cosine - b * sine, b * cosine + a * sine
    return out


def random_batch(random: np.random.Generator, most_keys: int) -> list[tuple[int, int]]:
    """(queries, keys) of a step: single queries, prompts, rests of prompts, now and then a sequence that has none."""
    batch = []
    for _ in range(random.integers(1, 5)):
        near = int(random.choice([1, 2, 16, 32, 48, 256, 272, 512, most_keys]))
        keys = max(1, min(most_keys, near + int(random.integers(-1, 2))))
        some = min(keys, int(random.integers(2, 41)))
        batch.append((int(random.choice([0, 1, some, keys], p=[0.1, 0.4, 0.4, 0.1])), keys))
    return [(max(1, batch[0][0]), batch[0][1]), *batch[1:]]


def random_layer(random: np.random.Generator, dims: tuple[int, int], kv_heads: int, group: int) -> Layer:
    heads = kv_heads * group
    sight = random.random()
    return Layer(
        heads,
        kv_heads,
        *dims,
        window=int(random.choice([1, 5, 16, 100, 300])) if sight < 0.3 else 0,
        chunk=int(random.choice([1, 16, 100, 256])) if sight > 0.8 else 0,
        softcap=float(random.choice([0, 0, 2])),
        slopes=exact(random.random(heads).astype(np.float32) * 0.1) if random.random() < 0.2 else None,
        sinks=exact(random.standard_normal(heads).astype(np.float32)) if random.random() < 0.3 else None,
    )


def attention_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    key_dim = int(random.choice([2, 6, 16, 18, 30, 32, 34, 62, 64, 66, 80, 96, 128, 256]))
    value_dim = key_dim if random.random() < 0.7 else int(random.choice([1, 2, 15, 17, 31, 33, 40, 64]))
    layer = random_layer(
        random, (key_dim, value_dim), int(random.choice([1, 2])), int(random.choice([1, 2, 3, 5, 8, 9]))
    )
    if value_dim <= key_dim and random.random() < 0.2:
        layer.is_value_in_key = True
    layer.stored = int(random.choice([0, 0, *FLOAT8]))
    most_keys = 600 if layer.heads * key_dim <= 256 else 270  # more than two blocks of keys, or one
    paging = Paging(random, random_batch(random, most_keys), int(random.choice([1, 8, 16, 32])))
    cache = filled_cache(random, paging, [layer], type)
    query = AS[type](random.standard_normal((paging.tokens, layer.heads * key_dim)))
    stride = query.shape[1] + int(random.choice([0, 1, 2, 64]))
    given = rows_apart(query, stride, True)

    def attend() -> np.ndarray:
        out = exact(np.zeros((paging.tokens, layer.heads * value_dim), query.dtype), True)
        operators.cpp_attend(
            type, layer.struct(), paging.struct(), address(cache), address(given), stride, address(out)
        )
        return out

    out = operators.same_on_one_thread(attend)
    numbers = FLOAT8[layer.stored](cache) if layer.stored else widen(cache)
    # Numbers of 8 bits are of any size up to 8: so may be what they are weighted to.
    size = 8 if layer.stored else 1
    assert_near(out, attention(layer, paging, numbers, widen(query)), 2 * TOLERANCE[type] * size)
