"""y += B[slot] (A[slot] x), each row by its own adapter's matrices, in two launches."""

# Rows come in tiles of one adapter slot. `_shrink` multiplies the rows of a tile by A, `_expand` multiplies what comes
# of it by B and adds that to y, which is rounded once. Tiles that are not in use end at once, and rows of no tile are
# not touched: so a grid of one size serves every batch of its number of rows, and can be captured. Where few tiles
# would keep few processors busy, the columns of A are shared out too: each part's sums are written down, and `_expand`
# adds them in the order of the parts.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.matmul import parts
from model_server.kernels.product import product

COLUMNS = 64
"""The most outputs of one column tile."""
# Of A's rows, and of a sum over the rank, at a time.
_INNER = 64


@dataclass(frozen=True, slots=True)
class _Form:
    """depth: columns of A at a time."""

    depth: int
    num_warps: int
    num_stages: int


# By the rows of a tile; both fit the 99 KiB of the smaller GPUs. float32 has half the depth.
_FORMS = {16: _Form(128, 4, 4), 64: _Form(64, 4, 3)}


@dataclass(frozen=True, slots=True)
class SlotMatrices:
    """The matrices of all adapter slots for one product."""

    # [slots, inner, in], `rank` rows for each module that reads the input.
    a: Tensor
    # [slots, kept, rank], of the outputs that adapters may change.
    b: Tensor
    # [slots, 2, kept] float32: multiplies these outputs, then adds; None: nothing does.
    affine: Tensor | None
    # [4, num] int32, tiles of at most COLUMNS outputs: first, end, first inner value, and first place in `kept`.
    columns: Tensor


def add(matrices: SlotMatrices, tiles: Tensor, x: Tensor, out: Tensor, num_processors: int) -> None:
    """Change out [n, outputs], float32 or of x's type, for x [n, in].

    Args:
        tiles: [num, 1 + rows] int32: slot (below 0: unused), then up to 16 or 64 rows (below 0: none), each in one
            tile.
    """
    num_tiles, rows = tiles.shape[0], tiles.shape[1] - 1
    if num_tiles == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    inner, depth = matrices.a.shape[1:]
    form = _FORMS[rows]
    step = form.depth if x.dtype != torch.float32 else form.depth // 2
    blocks = triton.cdiv(inner, _INNER)
    num_parts, share = parts(num_tiles * blocks, depth, step, num_processors)
    sums = torch.empty(num_parts, num_tiles * rows, inner, dtype=torch.float32, device=x.device)
    _shrink[(num_tiles, blocks * num_parts)](
        x, matrices.a, sums, tiles, x.stride(0), inner, depth, share, num_parts,
        ROWS=rows, INNER=_INNER, DEPTH=step, EVEN=depth % step == 0,
        num_warps=form.num_warps, num_stages=form.num_stages,
    )  # fmt: skip
    kept, rank = matrices.b.shape[1:]
    _expand[(num_tiles, matrices.columns.shape[1])](
        sums, matrices.b, matrices.b if matrices.affine is None else matrices.affine, out, tiles, matrices.columns,
        num_tiles, inner, kept, rank, matrices.columns.shape[1], out.stride(0), num_parts,
        ROWS=rows, COLUMNS=COLUMNS, RANK=rank_step(rank), AFFINE=matrices.affine is not None,
        num_warps=4, num_stages=2,
    )  # fmt: skip


def rank_step(rank: int) -> int:
    """Return how much of a sum over `rank` numbers is added at a time."""
    return min(_INNER, max(16, 1 << (rank - 1).bit_length()))


@triton.jit(do_not_specialize=["num_parts"])
def _shrink(
    x,
    a,
    sums,
    tiles,
    x_stride,
    inner,
    depth,
    share,
    num_parts,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile * (ROWS + 1)).to(tl.int64)
    if slot < 0:
        return
    part = tl.program_id(1) % num_parts
    place = tl.arange(0, ROWS)
    row = tl.load(tiles + tile * (ROWS + 1) + 1 + place)
    live = row >= 0
    value = tl.program_id(1) // num_parts * INNER + tl.arange(0, INNER)
    inside = value < inner
    column = tl.arange(0, DEPTH)
    left = x + row[:, None].to(tl.int64) * x_stride + column[None, :]
    right = a + (slot * inner + value[None, :]) * depth + column[:, None]
    total = tl.zeros([ROWS, INNER], tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, depth), DEPTH):
        if EVEN:
            given = tl.load(left + start, mask=live[:, None], other=0.0)
            matrix = tl.load(right + start, mask=inside[None, :], other=0.0)
        else:
            rest = column < depth - start
            given = tl.load(left + start, mask=live[:, None] & rest[None, :], other=0.0)
            matrix = tl.load(right + start, mask=inside[None, :] & rest[:, None], other=0.0)
        total = product(given, matrix, total)
    at = (part * tl.num_programs(0) + tile).to(tl.int64) * ROWS + place[:, None]
    tl.store(sums + at * inner + value[None, :], total, mask=inside[None, :])


@triton.jit(do_not_specialize=["num_tiles", "num_columns", "num_parts"])
def _expand(
    sums,
    b,
    affine,
    out,
    tiles,
    columns,
    num_tiles,
    inner,
    kept,
    rank,
    num_columns,
    out_stride,
    num_parts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    AFFINE: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile * (ROWS + 1)).to(tl.int64)
    if slot < 0:
        return
    place = tl.arange(0, ROWS)
    row = tl.load(tiles + tile * (ROWS + 1) + 1 + place)
    live = row >= 0
    here = columns + tl.program_id(1)
    first = tl.load(here)
    stop = tl.load(here + num_columns)
    begin = tl.load(here + 2 * num_columns)
    column = tl.arange(0, COLUMNS)
    inside = first + column < stop
    output = tl.load(here + 3 * num_columns) + column
    term = tl.arange(0, RANK)
    matrix = b + (slot * kept + output[None, :]) * rank
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rank, RANK):
        rest = term < rank - start
        value = tl.zeros([ROWS, RANK], tl.float32)
        for part in range(num_parts):
            at = (part * num_tiles + tile).to(tl.int64) * ROWS + place[:, None]
            value += tl.load(sums + at * inner + begin + start + term[None, :], mask=rest[None, :], other=0.0)
        weight = tl.load(matrix + start + term[:, None], mask=rest[:, None] & inside[None, :], other=0.0)
        total = product(value.to(b.dtype.element_ty), weight, total)
    target = out + row[:, None].to(tl.int64) * out_stride + first + column[None, :]
    mask = live[:, None] & inside[None, :]
    total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    if AFFINE:
        gain = affine + slot * 2 * kept + output
        total = total * tl.load(gain, mask=inside, other=1.0)[None, :]
        total += tl.load(gain + kept, mask=inside, other=0.0)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)
