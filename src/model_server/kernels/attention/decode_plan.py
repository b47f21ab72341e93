"""Which program of split-KV decode attention reads which keys: a small kernel per step, without the host."""

# Rows of very different lengths share a batch, and only the device knows the lengths (a CUDA graph must hold for any).
# So all keys in reach are cut into items of about equal size: with T keys in all and room for N items, an item is at
# least T / N keys. A row of v keys gives ceil(v / size) items, all rows together at most N + rows: a number that
# follows from shapes alone, and is the grid. Programs beyond the last item end at once.
#
# The alternative, a fixed number of splits per row, has to choose between one that is too small for the longest row
# that could come and one whose programs are mostly empty (128k tokens possible, 1k present).

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.attention.parts import REACH_ALL, REACH_CHUNK, REACH_WINDOW, first_seen

# Columns of an item: sequence (-1: none), row of the query, first key, one past the last key, its number among the
# items of its sequence, how many those are, position of the query. The last column is padding.
ITEM_WIDTH = 8
_ITEMS_PER_PROGRAM = 64
_SEQUENCES_AT_ONCE = 128
NO_LIMIT = 2**30


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How keys are cut into items."""

    # Room beside one per row; None: what `max_splits` needs.
    target_items: int | None
    # No item is cut smaller.
    min_keys: int
    # Items of one row at most.
    max_splits: int

    def num_items(self, num_rows: int) -> int:
        """Bound the items of `num_rows` rows."""
        if self.target_items is None:
            return num_rows * self.max_splits
        return min(num_rows * self.max_splits, num_rows + self.target_items)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """items: [num_items, ITEM_WIDTH] int32; arrivals: [num_seqs, tiles] int32, zero between launches."""

    items: Tensor
    arrivals: Tensor


@triton.jit
def _visible(kv_lengths, cu_seqlens, sequences, mask, reach, REACH: tl.constexpr):
    """Return (first key, kv length, whether it is a single query) of `sequences`."""
    lengths = tl.load(kv_lengths + sequences, mask=mask, other=0)
    starts = tl.load(cu_seqlens + sequences, mask=mask, other=0)
    ends = tl.load(cu_seqlens + sequences + 1, mask=mask, other=0)
    first = first_seen(tl.maximum(lengths - 1, 0), reach, REACH)
    return first, lengths, (ends - starts) == 1


@triton.jit
def _cut(visible, target, min_keys, max_splits, total, UNIT: tl.constexpr):
    """Return (keys per item, items) of rows with `visible` keys; an empty row has one item."""
    size = tl.maximum((total + target - 1) // target, min_keys)
    splits = tl.minimum(tl.maximum((visible + size - 1) // size, 1), max_splits)
    even = (visible + splits - 1) // splits
    even = tl.maximum((even + UNIT - 1) // UNIT * UNIT, UNIT)
    return even, tl.maximum((visible + even - 1) // even, 1)


@triton.jit(do_not_specialize=["num_seqs", "num_items", "num_arrivals", "target"])
def plan_kernel(
    kv_lengths,
    cu_seqlens,
    items,
    arrivals,
    num_seqs,
    num_items,
    num_arrivals,
    target,
    min_keys,
    max_splits,
    reach,
    REACH: tl.constexpr,
    UNIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ITEMS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Find the owners of ITEMS items; counting all rows is cheaper than waiting for other programs."""
    lanes = tl.arange(0, SEQUENCES)
    total = tl.zeros([], tl.int32)
    for base in tl.range(0, num_seqs, SEQUENCES):
        sequences = base + lanes
        first, lengths, single = _visible(kv_lengths, cu_seqlens, sequences, sequences < num_seqs, reach, REACH)
        total += tl.sum(tl.where(single, lengths - first, 0))

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owner = tl.full([ITEMS], -1, tl.int32)
    number = tl.zeros([ITEMS], tl.int32)
    before = tl.zeros([], tl.int32)
    for base in tl.range(0, num_seqs, SEQUENCES):
        sequences = base + lanes
        first, lengths, single = _visible(kv_lengths, cu_seqlens, sequences, sequences < num_seqs, reach, REACH)
        size, count = _cut(lengths - first, target, min_keys, max_splits, total, UNIT)
        count = tl.where(single, count, 0)
        ends = before + tl.cumsum(count, 0)
        starts = ends - count
        mine = (item[:, None] >= starts[None, :]) & (item[:, None] < ends[None, :])
        owner += tl.sum(tl.where(mine, sequences[None, :] + 1, 0), 1)
        number += tl.sum(tl.where(mine, item[:, None] - starts[None, :], 0), 1)
        before += tl.sum(count)

    owned = owner >= 0
    first, lengths, single = _visible(kv_lengths, cu_seqlens, owner, owned, reach, REACH)
    size, count = _cut(lengths - first, target, min_keys, max_splits, total, UNIT)
    begin = first + number * size
    record = items + item * WIDTH
    inside = item < num_items
    tl.store(record, owner, mask=inside)
    tl.store(record + 1, tl.load(cu_seqlens + owner, mask=owned, other=0), mask=inside)
    tl.store(record + 2, begin, mask=inside)
    tl.store(record + 3, tl.minimum(begin + size, lengths), mask=inside)
    tl.store(record + 4, number, mask=inside)
    tl.store(record + 5, count, mask=inside)
    tl.store(record + 6, lengths - 1, mask=inside)
    for base in tl.range(tl.program_id(0) * ITEMS, num_arrivals, tl.num_programs(0) * ITEMS):
        places = base + tl.arange(0, ITEMS)
        tl.store(arrivals + places, tl.zeros([ITEMS], tl.int32), mask=places < num_arrivals)


def plan_decode(
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_rows: int,
    tiles_per_row: int,
    rule: SplitRule,
    unit: int,
    window: int | None = None,
    chunk: int | None = None,
) -> DecodePlan:
    """Cut the keys that a batch's single queries see.

    Args:
        kv_lengths: [num_seqs] int32; 0 gives an empty item.
        cu_seqlens_q: [num_seqs + 1] int32; sequences with several queries are passed over.
        tiles_per_row: Programs that share an item's keys.
        unit: Items are multiples of this many keys.
    """
    num_seqs = kv_lengths.shape[0]
    num_items = rule.num_items(num_rows)
    items = torch.empty(num_items, ITEM_WIDTH, dtype=torch.int32, device=kv_lengths.device)
    arrivals = torch.empty(num_seqs, tiles_per_row, dtype=torch.int32, device=kv_lengths.device)
    kind = REACH_WINDOW if window is not None else REACH_ALL if chunk is None else REACH_CHUNK
    plan_kernel[(triton.cdiv(num_items, _ITEMS_PER_PROGRAM),)](
        kv_lengths,
        cu_seqlens_q,
        items,
        arrivals,
        num_seqs,
        num_items,
        arrivals.numel(),
        rule.target_items or NO_LIMIT,
        rule.min_keys,
        rule.max_splits,
        window or chunk or 0,
        REACH=kind,
        UNIT=unit,
        SEQUENCES=_SEQUENCES_AT_ONCE,
        ITEMS=_ITEMS_PER_PROGRAM,
        WIDTH=ITEM_WIDTH,
        num_warps=4,
    )
    return DecodePlan(items, arrivals)
