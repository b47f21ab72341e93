"""Moves the rows of a decoding batch on by a token, as `batch.advance`, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128


@triton.jit(do_not_specialize=["count", "stride"])
def advance(positions, tables, kv_lengths, slots, count, stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    position = tl.load(positions + row, mask=is_row, other=0) + 1
    block = tl.load(tables + row.to(tl.int64) * stride + position // BLOCK, mask=is_row, other=0)
    tl.store(positions + row, position, mask=is_row)
    tl.store(kv_lengths + row, (position + 1).to(tl.int32), mask=is_row)
    tl.store(slots + row, block.to(tl.int64) * BLOCK + position % BLOCK, mask=is_row)


def advance_rows(positions: Tensor, tables: Tensor, block_size: int, kv_lengths: Tensor, slots: Tensor) -> None:
    """Compute `batch.advance.plain`."""
    count = positions.shape[0]
    if count:
        advance[(triton.cdiv(count, _ROWS),)](
            positions, tables, kv_lengths, slots, count, tables.stride(0), BLOCK=block_size, ROWS=_ROWS
        )
