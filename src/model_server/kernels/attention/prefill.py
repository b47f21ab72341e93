"""Attention of runs of queries over the paged cache (prefill): each sees the cached prefix and its own run."""

# What bounds it is arithmetic: n queries on a prefix of p keys are about 2 * (n p + n^2 / 2) * heads * (key_dim +
# value_dim) flop. 8192 tokens of 32 heads of 128 are 0.55 TFLOP a layer, 0.7 ms at 788 TFLOP/s, while K and V of 8 KV
# heads are 33 MB. So:
#
# - a tile is `rows` (query, head) pairs of one KV head, flat: query i of head h of a group of g is row i * g + h. Short
#   runs then fill their tiles, and groups of any size leave no gap;
# - of a tile's keys only those around the diagonal, and around the beginning of a window, are masked; those between are
#   neither masked nor compared, those outside are not touched;
# - tiles are listed on the host, which knows all lengths, the most expensive first: what is left for the end is small.
#
# Key tiles begin at multiples of their size, counted from the sequence's first token. So a query's keys are added up in
# the same order whether its prompt comes whole or in chunks, and its result has the same bits.
#
# Online softmax as in FlashAttention-2 (arXiv 2307.08691).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.kernels.attention.parts import (
    SHARED_MEMORY,
    LayerArguments,
    Tiles,
    Widths,
    base2_scores,
    first_seen,
    layer_arguments,
    load_tile,
    normalised,
    shared_constants,
    shared_memory,
    slots_of,
    widths_of,
)
from model_server.kernels.product import product

# Columns of a tile: sequence, its first row, first token of the sequence's run, queries in the run, keys in all. The
# others are padding.
TILE_WIDTH = 8


@triton.jit
def _attend(
    maxima,
    weights,
    sums,
    begin,
    end,
    lowest,
    stop,
    main_query,
    rest_query,
    keys,
    values,
    table,
    slope,
    positions,
    firsts,
    lasts,
    scale,
    softcap,
    alibi_scale,
    slot_stride,
    MAIN_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys in [begin, end), multiples of KEYS, to the running softmax; with MASKED only those seen."""
    lanes = tl.arange(0, KEYS)
    main = tl.arange(0, MAIN)
    columns = tl.arange(0, VALUE)
    for start in tl.range(begin, end, KEYS):
        at = start + lanes
        present = (at >= lowest) & (at < stop)
        slots = slots_of(table, at, present, PAGE, MASKED) * slot_stride
        key = load_tile(keys + slots[:, None], main, present, MAIN_DIM, MAIN, MASKED).to(main_query.dtype)
        products = product(main_query, tl.trans(key), tl.zeros([ROWS, KEYS], tl.float32))
        if REST_DIM > 0:
            rest = tl.arange(0, REST)
            rest_rows = keys + slots[:, None] + MAIN_DIM
            rest_key = load_tile(rest_rows, rest, present, REST_DIM, REST, MASKED).to(main_query.dtype)
            products = product(rest_query, tl.trans(rest_key), products)
            value = key
        else:
            value_rows = values + slots[:, None]
            value = load_tile(value_rows, columns, present, VALUE_DIM, VALUE, MASKED).to(main_query.dtype)
        seen = (at[None, :] <= lasts[:, None]) & (at[None, :] >= firsts[:, None]) if MASKED else present
        scores = base2_scores(
            products, scale, softcap, slope, alibi_scale, at, positions, seen, SOFTCAP, ALIBI, MASKED
        )  # fmt: skip
        raised = tl.maximum(maxima, tl.max(scores, 1))
        # A row may see no key of its first tiles: then nothing is subtracted, for -inf - -inf is NaN.
        against = tl.where(raised == float("-inf"), 0.0, raised) if MASKED else raised
        shrink = tl.exp2(maxima - against)
        shares = tl.exp2(scores - against[:, None])
        weights = weights * shrink + tl.sum(shares, 1)
        sums = product(shares.to(value.dtype), value, sums * shrink[:, None])
        maxima = raised
    return maxima, weights, sums


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    query,
    keys,
    values,
    tables,
    tiles,
    last_keys,
    first_keys,
    slopes,
    sinks,
    output,
    scale,
    softcap,
    alibi_scale,
    value_scale,
    reach,
    query_row_stride,
    query_head_stride,
    slot_stride,
    key_head_stride,
    value_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,  # 0: values are stored; else they are the first MAIN_DIM numbers of the keys
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    REACH: tl.constexpr,
    AHEAD: tl.constexpr,  # last_keys and first_keys say what a row sees, as in `AttentionMetadata`
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Process one tile of rows."""
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    record = tiles + program // KV_HEADS * WIDTH
    sequence = tl.load(record)
    first_row = tl.load(record + 1)
    first_token = tl.load(record + 2)
    num_queries = tl.load(record + 3)
    num_keys = tl.load(record + 4)

    num_rows = num_queries * GROUP
    row = first_row + tl.arange(0, ROWS)
    stored = row < num_rows
    row = tl.minimum(row, num_rows - 1)
    heads = kv_head * GROUP + row % GROUP
    tokens = (first_token + row // GROUP).to(tl.int64)
    prefix = num_keys - num_queries
    positions = prefix + row // GROUP
    first_position = prefix + first_row // GROUP
    last_position = prefix + (tl.minimum(first_row + ROWS, num_rows) - 1) // GROUP

    main = tl.arange(0, MAIN)
    columns = tl.arange(0, VALUE)
    query_rows = query + tokens[:, None] * query_row_stride + heads[:, None] * query_head_stride
    main_query = load_tile(query_rows, main, stored, MAIN_DIM, MAIN, True)
    if REST_DIM > 0:
        rest_query = load_tile(query_rows + MAIN_DIM, tl.arange(0, REST), stored, REST_DIM, REST, True)
    else:
        rest_query = main_query
    slope = tl.load(slopes + heads) if ALIBI != 0 else 0.0
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    table = tables + sequence.to(tl.int64) * table_stride

    firsts = first_seen(positions, reach, REACH)
    if AHEAD:
        lasts = tl.load(last_keys + tokens)
        if REACH == 1:
            given = tl.load(first_keys + tokens)
            firsts = tl.where(given >= 0, tl.minimum(given, firsts), firsts)
        lowest, highest = tl.min(firsts, 0), tl.max(firsts, 0)
        nearest, stop = tl.min(lasts, 0), tl.max(lasts, 0) + 1
    else:
        lasts = positions
        lowest = first_seen(first_position, reach, REACH)
        highest = first_seen(last_position, reach, REACH)
        nearest, stop = first_position, last_position + 1
    # Keys in [open_begin, open_end) are seen by all rows, in whole tiles.
    open_begin = (highest + KEYS - 1) // KEYS * KEYS
    open_end = tl.maximum((nearest + 1) // KEYS * KEYS, open_begin)
    maxima = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE], tl.float32)
    if REACH != 0:
        maxima, weights, sums = _attend(
            maxima, weights, sums, lowest // KEYS * KEYS, tl.minimum(open_begin, stop), lowest, stop,
            main_query, rest_query, keys, values, table, slope, positions, firsts, lasts,
            scale, softcap, alibi_scale, slot_stride,
            MAIN_DIM, REST_DIM, VALUE_DIM, PAGE, SOFTCAP, ALIBI, ROWS, KEYS, MAIN, REST, VALUE, True,
        )  # fmt: skip
    maxima, weights, sums = _attend(
        maxima, weights, sums, open_begin, open_end, lowest, stop,
        main_query, rest_query, keys, values, table, slope, positions, firsts, lasts,
        scale, softcap, alibi_scale, slot_stride,
        MAIN_DIM, REST_DIM, VALUE_DIM, PAGE, SOFTCAP, ALIBI, ROWS, KEYS, MAIN, REST, VALUE, False,
    )  # fmt: skip
    maxima, weights, sums = _attend(
        maxima, weights, sums, open_end, stop, lowest, stop,
        main_query, rest_query, keys, values, table, slope, positions, firsts, lasts,
        scale, softcap, alibi_scale, slot_stride,
        MAIN_DIM, REST_DIM, VALUE_DIM, PAGE, SOFTCAP, ALIBI, ROWS, KEYS, MAIN, REST, VALUE, True,
    )  # fmt: skip
    sink = tl.load(sinks + heads) if SINKS else 0.0
    result = normalised(sums, maxima, weights, sink, value_scale, SINKS)
    places = output + tokens[:, None] * (KV_HEADS * GROUP * VALUE_DIM) + heads[:, None] * VALUE_DIM + columns[None, :]
    tl.store(places, result.to(output.dtype.element_ty), mask=stored[:, None] & (columns < VALUE_DIM)[None, :])


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """All of a launch that does not depend on the batch."""

    widths: Widths
    tiles: Tiles


def prefill_config(
    layer: AttentionLayer, *, value_in_key: bool, cache_dtype: torch.dtype, device: torch.device
) -> PrefillConfig:
    """The config for a layer on `device`."""
    widths = widths_of(layer, value_in_key)
    return PrefillConfig(widths, prefill_tiles(widths, cache_dtype.itemsize, shared_memory(device))[0])


def prefill_tiles(widths: Widths, cache_itemsize: int, memory: int) -> list[Tiles]:
    """List candidates for these widths, within `memory` bytes (see `prefill_choice`)."""
    # Eight warps hold rows * (value_dim + keys) sums and scores in registers: 128 * (128 + 128) are 128 of 255 each.
    if cache_itemsize == 4:
        return [Tiles(rows=32, keys=16, num_warps=8, num_stages=3)]
    width = max(widths.main_tile, widths.value_tile)
    # sm_80's kind of product holds queries in registers too: wide heads leave room for half as many.
    rows = 64 if width > 256 else 128
    if width > 128 and memory < SHARED_MEMORY[9, 0]:
        rows //= 2
    keys = 32 if width > 256 else 64 if width > 128 or cache_itemsize == 1 else 128

    def fits(buffers: int, keys: int) -> bool:
        beside = rows * (widths.main_tile + widths.rest_tile + keys) * 2
        return buffers * keys * widths.key_bytes(cache_itemsize) + beside <= memory

    while keys > 32 and not fits(2, keys):
        keys //= 2
    while rows > 16 and not fits(1, keys):
        rows //= 2
    # Five stages give keys three buffers where the tensor cores read them there (sm_90), three give two; see also
    # `paged_decode`. For latent heads three buffers cost registers that they do not have.
    has_three = fits(3, keys) and width <= 256
    candidates = [Tiles(rows=rows, keys=keys, num_warps=8, num_stages=5 if has_three else 3)]
    # Two buffers leave one tile to load ahead. Half as many keys in three may be faster, though more are masked.
    if not has_three and keys == 128 and cache_itemsize == 2 and fits(3, 64):
        candidates.append(Tiles(rows=rows, keys=64, num_warps=8, num_stages=5))
    return candidates


def tile_list(
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    group: int,
    rows: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    skip_single: bool = False,
) -> Tensor:
    """List a batch's tiles [num_tiles, TILE_WIDTH] int32 on the CPU, those with most keys first.

    Args:
        group: Query heads per KV head.
        skip_single: Sequences with one query have none.
    """
    tiles: list[tuple[int, tuple[int, ...]]] = []
    first_token = 0
    for sequence, (queries, keys) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        if queries > 1 or not skip_single:
            for row in range(0, queries * group, rows):
                first = keys - queries + row // group
                last = keys - queries + min(row + rows - 1, queries * group - 1) // group
                lowest = first - first % chunk if chunk else max(0, first + 1 - window) if window else 0
                tiles.append((last - lowest, (sequence, row, first_token, queries, keys, 0, 0, 0)))
        first_token += queries
    tiles.sort(key=lambda tile: -tile[0])
    return torch.tensor([tile for _, tile in tiles], dtype=torch.int32).view(-1, TILE_WIDTH)


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    layer: AttentionLayer,
    config: PrefillConfig,
    *,
    out: Tensor,
    reach: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend for the queries in `tiles`, in one launch; arguments as in `paged_decode`.

    Args:
        tiles: [num_tiles, TILE_WIDTH] on the device.
        reach: `last_keys` and `first_keys` as int32; None: causal.
    """
    if tiles.shape[0] == 0:
        return out
    arguments = layer_arguments(layer)
    prefill_kernel[(tiles.shape[0] * layer.num_kv_heads,)](
        query,
        keys,
        values,
        block_tables,
        tiles,
        *(reach or (None, None)),
        arguments.slopes,
        arguments.sinks,
        out,
        *(arguments.scale, arguments.softcap, arguments.alibi_scale, layer.value_scale, arguments.reach),
        *(query.stride(0), query.stride(1), keys.stride(1), keys.stride(2), values.stride(2)),
        block_tables.stride(0),
        **_constants(layer, arguments, config, keys.shape[1], ahead=reach is not None),
        num_warps=config.tiles.num_warps,
        num_stages=config.tiles.num_stages,
    )
    return out


def _constants(
    layer: AttentionLayer, arguments: LayerArguments, config: PrefillConfig, page: int, *, ahead: bool
) -> dict[str, int | bool]:
    shared = shared_constants(layer, arguments, config.widths, config.tiles, page)
    return shared | {"REACH": arguments.reach_kind, "AHEAD": ahead, "WIDTH": TILE_WIDTH}
