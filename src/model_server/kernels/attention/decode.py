"""Attention of single queries over the paged cache (decode), split along the keys."""

# What bounds it is reading K and V once: n keys of h KV heads are n * h * (key_dim + value_dim) * itemsize bytes, and
# the arithmetic on them is 4 * group flop per byte at bfloat16, far below what the tensor cores give. On a GPU of B
# bytes/s a batch of b rows of c keys takes at least b * c * h * (key_dim + value_dim) * itemsize / B: 64 rows of 4096
# keys of the 8B shape (8 KV heads of 128) are 1.07 GB a layer, 0.25 ms at 4.3 TB/s. So that the memory is busy:
#
# - all query heads of a KV head are one tile: K and V are read once for the group. Tiles have 16 rows or more, the
#   least that the tensor cores take; what is padding costs no memory traffic. The queries of a window (the newest token
#   of a sequence and its draft) are in the same tile, each with its own last key: K and V are read once for the window.
# - each thread loads 16 bytes along the head, and the loop is pipelined: the next tile (about 32 KiB) is on its way
#   while one is computed. Three programs per processor have about 100 KiB in flight; 4.3 TB/s at 1 us latency ask for
#   33 KiB.
# - the keys of all rows are cut into items of equal size (`decode_plan`), about eight programs per processor.
# - partial results are 4 bytes * value_dim per query head and item: 0.4 % of 1024 keys of that shape, 3 % of the
#   fewest.
#
# The last program of a row to finish merges the row's partial results, in the order of the keys whatever order they
# came in, so that no second kernel is launched. Arrivals are counted with an atomic add of acquire and release order
# behind a barrier: what other programs stored before they counted is visible to the last. The online softmax is that of
# arXiv 1805.02867; the split is flash decoding's.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.kernels.attention.decode_config import DecodeConfig
from model_server.kernels.attention.decode_plan import ITEM_WIDTH, DecodePlan
from model_server.kernels.attention.parts import (
    LayerArguments,
    base2_scores,
    layer_arguments,
    load_tile,
    merged,
    normalised,
    shared_constants,
    slots_of,
)
from model_server.kernels.dependent import after_previous, early_launch
from model_server.kernels.product import product


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    query,
    keys,
    values,
    tables,
    items,
    arrivals,
    lengths,  # [num_tokens] int32: keys that each query sees; only with several places
    slopes,
    sinks,
    partials,
    stats,
    output,
    scale,
    softcap,
    alibi_scale,
    value_scale,
    query_row_stride,
    query_head_stride,
    slot_stride,
    key_head_stride,
    value_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,  # queries of a sequence
    PARTS: tl.constexpr,  # programs that share a group's query heads, at all places
    MAIN_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,  # 0: values are stored; else they are the first MAIN_DIM numbers of the keys
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Process one item of keys for (a part of) the query heads of one KV head."""
    program = tl.program_id(0)
    tile = program % (KV_HEADS * PARTS)
    item = program // (KV_HEADS * PARTS)
    record = items + item * WIDTH
    after_previous(EARLY)
    sequence = tl.load(record)
    if sequence < 0:
        return
    row = tl.load(record + 1).to(tl.int64)
    first = tl.load(record + 2)
    stop = tl.load(record + 3)
    number = tl.load(record + 4)
    count = tl.load(record + 5)
    position = tl.load(record + 6)

    kv_head = tile // PARTS
    in_group = tile % PARTS * ROWS + tl.arange(0, ROWS)
    stored = in_group < GROUP * PLACES
    inner = tl.where(stored, in_group, 0)
    heads = kv_head * GROUP + inner % GROUP
    main = tl.arange(0, MAIN)
    columns = tl.arange(0, VALUE)
    if PLACES == 1:
        query_rows = query + row * query_row_stride + heads[:, None] * query_head_stride
    else:
        tokens = row * PLACES + inner // GROUP
        query_rows = query + tokens[:, None] * query_row_stride + heads[:, None] * query_head_stride
    main_query = load_tile(query_rows, main, stored, MAIN_DIM, MAIN, True)
    if REST_DIM > 0:
        rest = tl.arange(0, REST)
        rest_query = load_tile(query_rows + MAIN_DIM, rest, stored, REST_DIM, REST, True)
    slope = tl.load(slopes + heads) if ALIBI != 0 else 0.0
    table = tables + sequence.to(tl.int64) * table_stride
    positions = tl.zeros([ROWS], tl.int32) + position
    if PLACES > 1:
        positions = tl.load(lengths + tokens) - 1

    maxima = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE], tl.float32)
    lanes = tl.arange(0, KEYS)
    for start in tl.range(first, stop, KEYS):
        at = start + lanes
        present = at < stop
        slots = slots_of(table, at, present, PAGE, True) * slot_stride
        key_rows = keys + slots[:, None] + kv_head * key_head_stride
        key = load_tile(key_rows, main, present, MAIN_DIM, MAIN, True).to(main_query.dtype)
        products = product(main_query, tl.trans(key), tl.zeros([ROWS, KEYS], tl.float32))
        if REST_DIM > 0:
            rest_key = load_tile(key_rows + MAIN_DIM, rest, present, REST_DIM, REST, True).to(main_query.dtype)
            products = product(rest_query, tl.trans(rest_key), products)
            value = key
        else:
            value_rows = values + slots[:, None] + kv_head * value_head_stride
            value = load_tile(value_rows, columns, present, VALUE_DIM, VALUE, True).to(main_query.dtype)
        seen = present[None, :] if PLACES == 1 else present[None, :] & (at[None, :] <= positions[:, None])
        scores = base2_scores(
            products, scale, softcap, slope, alibi_scale, at, positions, seen, SOFTCAP, ALIBI, True
        )  # fmt: skip
        raised = tl.maximum(maxima, tl.max(scores, 1))
        base = raised
        if PLACES > 1:
            base = tl.where(raised == float("-inf"), 0.0, raised)  # a query may see no key of this item
        shrink = tl.exp2(maxima - base)
        shares = tl.exp2(scores - base[:, None])
        weights = weights * shrink + tl.sum(shares, 1)
        sums = product(shares.to(value.dtype), value, sums * shrink[:, None])
        maxima = raised

    places = item.to(tl.int64) * (KV_HEADS * GROUP * PLACES) + kv_head * (GROUP * PLACES) + inner
    if PLACES == 1:
        target = output + row * (KV_HEADS * GROUP * VALUE_DIM) + heads[:, None] * VALUE_DIM + columns[None, :]
    else:
        at_token = output + tokens[:, None] * (KV_HEADS * GROUP * VALUE_DIM)
        target = at_token + heads[:, None] * VALUE_DIM + columns[None, :]
    inside = stored[:, None] & (columns < VALUE_DIM)[None, :]
    sink = tl.load(sinks + heads) if SINKS else 0.0
    if count == 1:
        result = normalised(sums, maxima, weights, sink, value_scale, SINKS)
        tl.store(target, result.to(output.dtype.element_ty), mask=inside)
    else:
        tl.store(partials + places[:, None] * VALUE_DIM + columns[None, :], sums, mask=inside)
        tl.store(stats + places * 2, maxima, mask=stored)
        tl.store(stats + places * 2 + 1, weights, mask=stored)
        tl.debug_barrier()  # all threads have stored before one of them counts
        arrival = arrivals + sequence * (KV_HEADS * PARTS) + tile
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == count - 1:
            tl.store(arrival, 0)  # for the next layer
            first_places = places - number.to(tl.int64) * (KV_HEADS * GROUP * PLACES)
            sums, maxima, weights = merged(
                partials,
                stats,
                first_places,
                count,
                columns,
                stored,
                KV_HEADS * GROUP * PLACES,
                VALUE_DIM,
                ROWS,
                VALUE,
                UNROLL,
            )
            result = normalised(sums, maxima, weights, sink, value_scale, SINKS)
            tl.store(target, result.to(output.dtype.element_ty), mask=inside)


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    layer: AttentionLayer,
    config: DecodeConfig,
    *,
    out: Tensor,
    kv_lengths: Tensor | None = None,
) -> Tensor:
    """Attend for the planned single queries, in one launch; other rows of `out` stay.

    Args:
        query: [num_tokens, num_heads, head_dim], adjacent along the head.
        keys: [num_blocks, page, num_kv_heads, head_dim], also float8; computed with in the query's type.
        values: The same with value_dim, and the same stride between tokens.
        block_tables: [num_seqs, max_blocks] int32; with several places of each query, of which a sequence's first
            is read.
        kv_lengths: [num_tokens] int32, with several places only: the keys that each query sees.
        out: [num_tokens, num_heads * value_dim], contiguous, returned.
    """
    arguments = layer_arguments(layer)
    num_items = plan.items.shape[0]
    splits = config.rule.max_splits > 1
    size = (num_items if splits else 0) * layer.num_heads * config.places
    partials = torch.empty(size, layer.value_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(size, 2, dtype=torch.float32, device=query.device)
    tiles = config.tiles
    decode_kernel[(num_items * layer.num_kv_heads * config.parts,)](
        query,
        keys,
        values,
        block_tables,
        plan.items,
        plan.arrivals,
        plan.items if kv_lengths is None else kv_lengths,
        arguments.slopes,
        arguments.sinks,
        partials,
        stats,
        out,
        arguments.scale,
        arguments.softcap,
        arguments.alibi_scale,
        layer.value_scale,
        query.stride(0),
        query.stride(1),
        keys.stride(1),
        keys.stride(2),
        values.stride(2),
        block_tables.stride(0) * config.places,
        **_constants(layer, arguments, config, keys.shape[1]),
        **early_launch(query.device),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def _constants(
    layer: AttentionLayer, arguments: LayerArguments, config: DecodeConfig, page: int
) -> dict[str, int | bool]:
    shared = shared_constants(layer, arguments, config.widths, config.tiles, page)
    return shared | {"PLACES": config.places, "PARTS": config.parts, "UNROLL": config.unroll, "WIDTH": ITEM_WIDTH}
