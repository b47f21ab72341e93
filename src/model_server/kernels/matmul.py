"""Decode GEMMs of few rows, y = x W^T (+ bias), whose time is mostly that of reading W once."""

# Two ways. `_vector`, for one row: a program multiplies a few rows of W by x with plain arithmetic, straight from
# memory to registers. `_stream`, for up to 32 rows: W's rows are the tall side of a matrix instruction and x its narrow
# one, and W passes through shared memory some stages ahead of its use. Where W has too few rows to keep all processors
# busy, its columns are shared out too: each part's sums are written down and added in the order of the parts by
# `_add_parts`, so that equal inputs give equal bits. Which way is fastest, the library's included, is measured:
# `layers.linear`.
#
# `multiply_invariant` has one form for any number of rows, so that a row's result has the same bits in any batch.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.dependent import after_previous, early_launch
from model_server.kernels.product import product

MOST_ROWS = 32
# Programs per processor that hide each other's waits, and the fewest columns that are worth a part of their own.
_PROGRAMS = 2
_SMALLEST_PART = 512
_ADDED = 256


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A way to multiply: `columns` of the result and `depth` of the sum at a time."""

    vector: bool
    columns: int
    depth: int
    num_warps: int
    num_stages: int = 1


VECTOR_TILES = (TileConfig(True, 4, 1024, 4), TileConfig(True, 8, 512, 4))
STREAM_TILES = (TileConfig(False, 64, 128, 4, 4), TileConfig(False, 128, 64, 4, 4))

# Of any number of rows: wide enough that a prompt does not read the weights too often.
INVARIANT_TILES = TileConfig(False, 128, 64, 4, 4)
INVARIANT_ROWS = 64


def tile_configs(num_rows: int) -> tuple[TileConfig, ...]:
    """List what can multiply `num_rows` rows, up to MOST_ROWS."""
    return (*VECTOR_TILES, *STREAM_TILES) if num_rows == 1 else STREAM_TILES


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: TileConfig,
    num_processors: int,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute x [m, in] @ weight [out, in].T + bias [out] for m up to MOST_ROWS, in 16 bits with float32 sums, into
    `out` if given.
    """
    num_rows, depth = x.shape
    width = weight.shape[0]
    if out is None:
        out = torch.empty(num_rows, width, dtype=dtype or x.dtype, device=x.device)
    x = x.contiguous()
    blocks = triton.cdiv(width, tiles.columns)
    even = depth % tiles.depth == 0
    given = weight if bias is None else bias
    if tiles.vector:
        _vector[(blocks,)](
            x, weight, given, out, width, depth,
            COLUMNS=tiles.columns, DEPTH=tiles.depth, BIASED=bias is not None, EVEN=even, num_warps=tiles.num_warps,
            **early_launch(x.device),
        )  # fmt: skip
        return out
    num_parts, share = parts(blocks, depth, tiles.depth, num_processors)
    rows = 16 if num_rows <= 16 else 32
    split = num_parts > 1
    sums = torch.empty(num_parts, num_rows, width, dtype=torch.float32, device=x.device) if split else out
    _stream[(blocks, num_parts)](
        x, weight, given, sums, num_rows, width, depth, share,
        ROWS=rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, BIASED=bias is not None and not split, EVEN=even,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **early_launch(x.device),
    )  # fmt: skip
    if split:
        add_parts(sums, bias, out)
    return out


def multiply_invariant(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute x [m, in] @ weight [out, in].T + bias [out] with the same sums for any m, in 16 bits; in `out` if any."""
    num_rows, depth = x.shape
    width = weight.shape[0]
    if out is None:
        out = torch.empty(num_rows, width, dtype=dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tiles = INVARIANT_TILES
    _stream[(triton.cdiv(width, tiles.columns) * triton.cdiv(num_rows, INVARIANT_ROWS), 1)](
        x.contiguous(), weight, weight if bias is None else bias, out, num_rows, width, depth, depth,
        ROWS=INVARIANT_ROWS, COLUMNS=tiles.columns, DEPTH=tiles.depth, BIASED=bias is not None,
        EVEN=depth % tiles.depth == 0, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **early_launch(x.device),
    )  # fmt: skip
    return out


def add_parts(sums: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Add sums [parts, m, out] float32 in order, and bias [out], into out [m, out]."""
    num_parts, num_rows, width = sums.shape
    _add_parts[(triton.cdiv(width, _ADDED), num_rows)](
        sums,
        sums if bias is None else bias,
        out,
        num_rows,
        width,
        num_parts,
        BIASED=bias is not None,
        ADDED=_ADDED,
        **early_launch(out.device),
    )


def parts(blocks: int, depth: int, step: int, num_processors: int) -> tuple[int, int]:
    """Return how many parts a sum is cut into, and their length, a multiple of `step`."""
    wanted = max(1, min(_PROGRAMS * num_processors // blocks, depth // _SMALLEST_PART))
    share = triton.cdiv(triton.cdiv(depth, wanted), step) * step
    return triton.cdiv(depth, share), share


@triton.jit
def _vector(
    x,
    weight,
    bias,
    out,
    width,
    depth,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    inside = column < width
    matrix = weight + column[:, None].to(tl.int64) * depth + inner[None, :]
    total = tl.zeros([COLUMNS, DEPTH], tl.float32)
    # The first columns of W are under way while the kernel before this one still computes x.
    left = inside[:, None] if EVEN else inside[:, None] & (inner < depth)[None, :]
    part = tl.load(matrix, mask=left, other=0.0, eviction_policy="evict_first")
    after_previous(EARLY)
    for start in range(0, depth, DEPTH):
        row = tl.load(x + start + inner) if EVEN else tl.load(x + start + inner, mask=inner < depth - start, other=0.0)
        rest = depth - start - DEPTH
        left = inside[:, None] & (rest > 0) if EVEN else inside[:, None] & (inner < rest)[None, :]
        following = tl.load(matrix + start + DEPTH, mask=left, other=0.0, eviction_policy="evict_first")
        total += part.to(tl.float32) * row.to(tl.float32)[None, :]
        part = following
    result = tl.sum(total, 1)
    if BIASED:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _stream(
    x,
    weight,
    bias,
    out,
    num_rows,
    width,
    depth,
    share,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_previous(EARLY)
    part = tl.program_id(1)
    # Programs that read the same rows of W follow one another.
    row_blocks = tl.cdiv(num_rows, ROWS)
    column = tl.program_id(0) // row_blocks * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, DEPTH)
    inside = column < width
    live = row < num_rows
    matrix = weight + column[:, None].to(tl.int64) * depth + inner[None, :]
    rows = x + row[None, :].to(tl.int64) * depth + inner[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, depth), DEPTH):
        if EVEN:
            a = tl.load(matrix + start, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            b = tl.load(rows + start, mask=live[None, :], other=0.0)
        else:
            left = inner < depth - start
            a = tl.load(matrix + start, mask=inside[:, None] & left[None, :], other=0.0)
            b = tl.load(rows + start, mask=live[None, :] & left[:, None], other=0.0)
        total = product(a, b, total)
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out + (part * num_rows + row[None, :]).to(tl.int64) * width + column[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None] & live[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _add_parts(
    sums, bias, out, num_rows, width, num_parts, BIASED: tl.constexpr, ADDED: tl.constexpr, EARLY: tl.constexpr
):
    after_previous(EARLY)
    row = tl.program_id(1)
    column = tl.program_id(0) * ADDED + tl.arange(0, ADDED)
    inside = column < width
    total = tl.zeros([ADDED], tl.float32)
    for part in range(num_parts):
        total += tl.load(sums + (part * num_rows + row).to(tl.int64) * width + column, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + column, total.to(out.dtype.element_ty), mask=inside)
