"""What the attention kernels share: places in the cache, reach, scores, and a layer's constants.

Scores are in base 2 (times log2 e), so that the softmax needs only exp2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.attention.backend import AttentionLayer

# How a layer limits what a query sees beside causality, and which ALiBi it has: constants of the kernels.
REACH_ALL, REACH_WINDOW, REACH_CHUNK = 0, 1, 2
ALIBI_NONE, ALIBI_DISTANCE, ALIBI_BFLOAT16 = 0, 1, 2

# Strides that the kernels take, of tensors whose last axis is contiguous.
STRIDES = ("query_row_stride", "query_head_stride", "slot_stride", "key_head_stride", "value_head_stride")

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def nearest_bfloat16(x):
    """Round float32 to bfloat16, ties to even; the interpreter would cut."""
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def slots_of(table, positions, present, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Return int64 slots of `positions` under a block table; with MASKED, block 0 where not `present`."""
    # int64, since slot * row width passes 2^31 in pools of a few GiB. With `positions % PAGE` the compiler (Triton 3.6)
    # takes every slot for a multiple of PAGE, and loads 16 bytes at once from rows that are not aligned to 16.
    tl.static_assert(PAGE & (PAGE - 1) == 0)
    blocks = tl.load(table + positions // PAGE, mask=present, other=0) if MASKED else tl.load(table + positions // PAGE)
    return blocks.to(tl.int64) * PAGE + (positions & (PAGE - 1))


@triton.jit
def load_tile(rows, columns, present, DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Load [n, TILE] from row pointers [n, 1], 0 beyond DIM and, with MASKED, in absent rows."""
    # Slots that were never written may hold NaN, and 0 * NaN is NaN: they must not be loaded.
    if MASKED:
        return tl.load(rows + columns[None, :], mask=present[:, None] & (columns < DIM)[None, :], other=0.0)
    if DIM == TILE:
        return tl.load(rows + columns[None, :])
    return tl.load(rows + columns[None, :], mask=(columns < DIM)[None, :], other=0.0)


@triton.jit
def first_seen(position, reach, REACH: tl.constexpr):
    """Return the first key that a query sees; REACH 0: all, 1: a window, 2: chunks of `reach` keys."""
    if REACH == 1:
        return tl.maximum(position + 1 - reach, 0)
    if REACH == 2:
        return position - position % reach
    return position * 0


@triton.jit
def tanh(x):
    """Compute tanh without a library, near 0 by its series up to x^7."""
    shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    far = (1 - shrunk) / (1 + shrunk)
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -far, far))


@triton.jit
def base2_scores(
    products,  # [m, n] float32: q k
    scale,  # softmax scale, times the cache's scale of keys; times log2 e where neither softcap nor ALiBi follows
    softcap,
    slopes,  # [m] float32, if ALIBI
    alibi_scale,
    key_positions,  # [n] int32
    query_positions,  # [m] int32
    seen,  # [m, n], if MASKED
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Compute `AttentionLayer` scores [m, n] float32 in base 2; with MASKED, -inf where not `seen`."""
    # The last operation is a multiplication, whose result is then subtracted from: one instruction, which rounds once.
    # The mask comes before it, so that tiles round the same with and without.
    factor = scale
    scores = products
    if SOFTCAP or ALIBI != 0:
        factor = LOG2_E
        scores = products * scale
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    if ALIBI == 1:
        distances = key_positions[None, :] - query_positions[:, None]
        scores += slopes[:, None] * distances.to(tl.float32)
    if ALIBI == 2:
        # Falcon: slope, key position and their product are bfloat16 numbers. A product of two is exact in float32.
        positions = nearest_bfloat16(key_positions.to(tl.float32))
        scores += nearest_bfloat16(nearest_bfloat16(slopes)[:, None] * positions[None, :]) * alibi_scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    return scores * factor


@triton.jit
def merged(
    partials,
    stats,
    first_places,
    count,
    columns,
    stored,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return (sums, maxima, weights) of `count` parts, NUM_HEADS places apart."""
    inside = stored[:, None] & (columns < VALUE_DIM)[None, :]
    maxima = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    # Unrolled so that the loads of several parts, which depend on nothing, are in flight together.
    for part in tl.range(0, count, loop_unroll_factor=UNROLL):
        places = first_places + part * NUM_HEADS
        maximum = tl.load(stats + places * 2, mask=stored, other=0.0, cache_modifier=".cg")
        weight = tl.load(stats + places * 2 + 1, mask=stored, other=0.0, cache_modifier=".cg")
        at = partials + places[:, None] * VALUE_DIM + columns[None, :]
        values = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        raised = tl.maximum(maxima, maximum)
        old, new = tl.exp2(maxima - raised), tl.exp2(maximum - raised)
        weights = weights * old + weight * new
        sums = sums * old[:, None] + values * new[:, None]
        maxima = raised
    return sums, maxima, weights


@triton.jit
def normalised(sums, maxima, weights, sinks, value_scale, SINKS: tl.constexpr):
    """Turn sums [m, d], maxima and weights [m] into attention [m, d]; 0 for rows without keys.

    Args:
        sinks: [m] float32 scores in base e.
    """
    if SINKS:
        sinks = sinks * LOG2_E
        raised = tl.maximum(maxima, sinks)
        shrink = tl.exp2(maxima - raised)
        weights = weights * shrink + tl.exp2(sinks - raised)
        sums = sums * shrink[:, None]
    divisors = tl.where(weights == 0, 1.0, weights)
    return sums * (value_scale / divisors)[:, None]


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """A layer's constants for kernels; missing tensors are None and never read."""

    scale: float
    softcap: float
    alibi_scale: float
    reach: int
    slopes: Tensor | None
    sinks: Tensor | None
    reach_kind: int
    alibi_kind: int

    @property
    def has_softcap(self) -> bool:
        return self.softcap > 0


def layer_arguments(layer: AttentionLayer) -> LayerArguments:
    scale = layer.stored_scale
    if layer.softcap is None and layer.alibi is None:
        scale *= LOG2_E.value
    alibi_kind, alibi_scale = ALIBI_NONE, 1.0
    if layer.alibi is not None:
        falcon = layer.alibi.bfloat16_scale
        alibi_kind = ALIBI_DISTANCE if falcon is None else ALIBI_BFLOAT16
        alibi_scale = 1.0 if falcon is None else falcon
    reach_kind, reach = REACH_ALL, 0
    if layer.window is not None:
        reach_kind, reach = REACH_WINDOW, layer.window
    elif layer.chunk is not None:
        reach_kind, reach = REACH_CHUNK, layer.chunk
    return LayerArguments(
        scale=scale,
        softcap=layer.softcap or 0.0,
        alibi_scale=alibi_scale,
        reach=reach,
        slopes=None if layer.alibi is None else layer.alibi.slopes,
        sinks=layer.sinks,
        reach_kind=reach_kind,
        alibi_kind=alibi_kind,
    )


@dataclass(frozen=True, slots=True)
class Widths:
    """How a kernel cuts a head, in powers of two from 16 on, as tensor cores want.

    With values inside of keys `main` is the value, loaded once, and `rest` what a key has beyond it; else `rest` is 0.
    """

    main: int
    rest: int
    value: int

    @property
    def main_tile(self) -> int:
        return max(16, int(triton.next_power_of_2(self.main)))

    @property
    def rest_tile(self) -> int:
        return 0 if self.rest == 0 else max(16, int(triton.next_power_of_2(self.rest)))

    @property
    def value_tile(self) -> int:
        return max(16, int(triton.next_power_of_2(self.value)))

    def key_bytes(self, itemsize: int) -> int:
        """Return shared memory for a key and its value."""
        separate = 0 if self.rest else self.value_tile
        return (self.main_tile + self.rest_tile + separate) * itemsize


def widths_of(layer: AttentionLayer, value_in_key: bool) -> Widths:
    if value_in_key and layer.value_dim < layer.head_dim:
        return Widths(layer.value_dim, layer.head_dim - layer.value_dim, layer.value_dim)
    return Widths(layer.head_dim, 0, layer.value_dim)


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program's `rows` (query, head) pairs against `keys` keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# Bytes of shared memory that one program may use, by capability (CUDA C programming guide, "technical specifications
# per compute capability"). Others have 99 KiB.
SHARED_MEMORY = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024}
# Capability 10 has 227 KiB too, but Triton takes up to a half of it for what passes into tensor memory and out of it.
SHARED_MEMORY |= {(10, 0): 120 * 1024, (10, 3): 120 * 1024}


@cache
def shared_memory(device: torch.device) -> int:
    """Return bytes of shared memory for a program; an H200's in the interpreter."""
    capability = (9, 0) if device.type != "cuda" else torch.cuda.get_device_capability(device)
    return SHARED_MEMORY.get(capability, 99 * 1024)


@cache
def num_processors(device: torch.device) -> int:
    """Count multiprocessors; an H200's in the interpreter."""
    return 132 if device.type != "cuda" else int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_constants(
    layer: AttentionLayer, arguments: LayerArguments, widths: Widths, tiles: Tiles, page: int
) -> dict[str, int | bool]:
    """Return the kernels' common constants."""
    return {
        "KV_HEADS": layer.num_kv_heads,
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "MAIN_DIM": widths.main,
        "REST_DIM": widths.rest,
        "VALUE_DIM": widths.value,
        "PAGE": page,
        "SOFTCAP": arguments.has_softcap,
        "ALIBI": arguments.alibi_kind,
        "SINKS": arguments.sinks is not None,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "MAIN": widths.main_tile,
        "REST": widths.rest_tile,
        "VALUE": widths.value_tile,
    }
