"""Drafts from requests' own tokens in one launch, by the rule of `speculation.drafters.lookup`."""

# `speculation.drafters.lookup` has the rule, and the same in plain torch. A program keeps, for each of its lanes, the
# best place that the lane has met, as length of the match * 2^27 + place, so that the largest number is the longest
# match, and of equal ones the latest. The newest tokens are the same for all lanes; those before a place come from the
# cache that the load of the place has filled.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Lanes of a program; histories have fewer tokens than 2^27.
_LANES = 1024
_PLACES = tl.constexpr(1 << 27)
_LONGEST_MATCH = tl.constexpr(8)


@triton.jit(do_not_specialize=["stride", "most"])
def look_up(history, lengths, drafts, counts, stride, most, LANES: tl.constexpr, DRAFT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = history + row * stride
    length = tl.load(lengths + row).to(tl.int32)
    last = length - 1
    lanes = tl.arange(0, LANES)
    best = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, last, LANES):
        place = start + lanes
        matched = tl.zeros([LANES], tl.int32)
        equal = place < last
        for back in tl.static_range(_LONGEST_MATCH):
            newest = tl.load(ids + tl.maximum(last - back, 0))
            equal = equal & (place >= back)
            token = tl.load(ids + place - back, mask=equal, other=-1)
            equal = equal & (token == newest)
            matched += equal.to(tl.int32)
        best = tl.maximum(best, matched * _PLACES + place)
    found = tl.max(best, 0)
    matched = found // _PLACES
    first = found % _PLACES + 1
    short = tl.where(matched == 1, 1, tl.where(matched == 2, 2, 4))
    count = tl.where(matched == 0, 0, tl.where(matched <= 3, tl.minimum(most, short), most))
    number = tl.arange(0, DRAFT)
    # Behind the end of the history the draft continues in itself: its period is what it began with.
    period = tl.maximum(length - first, 1)
    drafted = tl.load(ids + first + number % period, mask=number < count, other=0)
    tl.store(drafts + row * most + number, drafted.to(tl.int64), mask=number < most)
    tl.store(counts + row, count.to(tl.int64))


def look_up_rows(history: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Compute `speculation.drafters.lookup.plain`."""
    rows = history.shape[0]
    drafts = torch.empty(rows, most, dtype=torch.int64, device=history.device)
    counts = torch.empty(rows, dtype=torch.int64, device=history.device)
    if rows:
        look_up[(rows,)](
            history, lengths, drafts, counts, history.stride(0), most,
            LANES=_LANES, DRAFT=triton.next_power_of_2(most),
        )  # fmt: skip
    return drafts, counts
