"""Products with quantized matrices, y = x W^T (+ bias), decoded in registers.

W is the tall side of a matrix instruction, x the narrow one, so decoded numbers never go back to memory. Few rows split
the sum as in `matmul`; a row's only scale multiplies its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.decoding import Matrix, decoded, group_values, halves
from model_server.kernels.matmul import add_parts, parts
from model_server.kernels.product import product


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A program's work: `rows` of x, `columns` of the result, `depth` of the sum at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


TILES = (
    TileConfig(16, 64, 128, 4, 4),
    TileConfig(32, 64, 128, 4, 4),
    TileConfig(64, 128, 64, 4, 3),
    TileConfig(128, 128, 64, 8, 3),
)
# Up to so many rows reading W is all the time there is to lose: the sum is split to keep all processors busy.
MOST_SPLIT_ROWS = 32


def tiles_for(num_rows: int) -> TileConfig:
    """The smallest tiles that hold all rows."""
    return next((tiles for tiles in TILES if num_rows <= tiles.rows), TILES[-1])


def multiply(
    x: Tensor, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype, num_processors: int,
    tiles: TileConfig | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute x [n, depth] @ matrix.T + bias [out] in 16 bits with float32 sums, into `out` if given; tiles by
    `tiles_for` if None.
    """
    num_rows = x.shape[0]
    depth, width = matrix.depth, matrix.width
    tiles = tiles or tiles_for(num_rows)
    blocks = triton.cdiv(width, tiles.columns)
    num_parts, share = parts(blocks, depth, tiles.depth, num_processors) if num_rows <= MOST_SPLIT_ROWS else (1, depth)
    split = num_parts > 1
    if out is None:
        out = torch.empty(num_rows, width, dtype=dtype, device=x.device)
    sums = torch.empty(num_parts, num_rows, width, dtype=torch.float32, device=x.device) if split else out
    within = matrix.within(tiles.depth)
    _decode_multiply[(blocks, triton.cdiv(num_rows, tiles.rows), num_parts)](
        x.contiguous(), matrix.numbers, matrix.scales, matrix.numbers if matrix.zeros is None else matrix.zeros,
        x if bias is None else bias, sums, num_rows, width, depth, share, matrix.group, matrix.height,
        matrix.scales.shape[-1], KIND=matrix.kind, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        GROUPS=tiles.depth // within, WHOLE_ROWS=matrix.num_groups == 1, BIASED=bias is not None and not split,
        EVEN=depth % tiles.depth == 0, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if split:
        add_parts(sums, bias, out)
    return out


@triton.jit(do_not_specialize=["num_rows", "height"])
def _decode_multiply(
    x,
    numbers,
    scales,
    zeros,
    bias,
    out,
    num_rows,
    width,
    depth,
    share,
    group,
    height,
    num_scales,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
):
    PAIRS: tl.constexpr = KIND != "plain" and KIND != "codes8" and KIND != "float8" and KIND != "float8_bits"
    PER_BYTE: tl.constexpr = 2 if PAIRS else 1
    part = tl.program_id(2)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, DEPTH)
    byte = tl.arange(0, DEPTH // PER_BYTE)
    num_bytes = depth // PER_BYTE
    inside = column < width
    live = row < num_rows
    matrix = numbers + column[:, None].to(tl.int64) * num_bytes + byte[None, :]
    rows = x + row[:, None].to(tl.int64) * depth + inner[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, depth), DEPTH):
        first = start // PER_BYTE
        if EVEN:
            raw = tl.load(matrix + first, mask=inside[:, None], eviction_policy="evict_first")
            given = tl.load(rows + start, mask=live[:, None], other=0.0)
        else:
            raw = tl.load(matrix + first, mask=inside[:, None] & (byte < num_bytes - first)[None, :], other=0.0)
            given = tl.load(rows + start, mask=live[:, None] & (inner < depth - start)[None, :], other=0.0)
        scale, zero = group_values(
            scales, zeros, column, start, width, depth, group, height, num_scales,
            KIND=KIND, GROUPS=GROUPS, WITHIN=DEPTH // GROUPS, WHOLE_ROWS=WHOLE_ROWS,
        )  # fmt: skip
        if PAIRS:
            even, odd = halves(given, DEPTH)
            total = product(decoded(raw & 15, scale, zero, zeros, given, KIND, WHOLE_ROWS), tl.trans(even), total)
            total = product(decoded(raw >> 4, scale, zero, zeros, given, KIND, WHOLE_ROWS), tl.trans(odd), total)
        else:
            total = product(decoded(raw, scale, zero, zeros, given, KIND, WHOLE_ROWS), tl.trans(given), total)
    if WHOLE_ROWS:
        total *= tl.load(scales + column // height, mask=inside, other=0.0).to(tl.float32)[:, None]
    if KIND == "nvfp4":
        total *= tl.load(zeros + column, mask=inside, other=0.0)[:, None]
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out + (part * num_rows + row[None, :]).to(tl.int64) * width + column[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None] & live[None, :])
