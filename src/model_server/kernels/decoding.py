"""Quantized matrices as kernels read them: layout, and decoding of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Kind = Literal["plain", "codes4", "codes8", "float4", "nvfp4", "mxfp4", "table4", "float8", "float8_bits"]

# 2 ** 23: the float32 numbers from there on have a distance of 1, so that a code is the lower bits of one.
_WHOLE = tl.constexpr(8388608.0)
_WHOLE_BITS = tl.constexpr(0x4B000000)
# The bits of an 8-bit float, moved to the places of a float32's, are smaller by this: 2 ** (127 - 7).
_FLOAT8_FACTOR = tl.constexpr(2.0**120)
# The same of 4-bit floats.
_FLOAT4_FACTOR = tl.constexpr(2.0**126)
# 2 ** -127, which float32 has without an exponent.
_LEAST_POWER_BITS = tl.constexpr(0x00400000)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Element (i, k) is `(number[i, k] - zeros[k // group, i]) * scales[k // group, i // height]`, zeros of floats 0.

    Contiguous tensors; several matrices (experts) have one more dimension in front.
    """

    kind: Kind
    # By kind: plain [out, depth] floating, without scales; codes4 [out, depth / 2] uint8, even columns in the lower
    # bits; codes8 [out, depth] uint8; float4 as codes4, but floats (E2M1); nvfp4 and mxfp4 the same with scales of 8
    # bits; table4 as codes4, but places in a table; float8 [out, depth] float8_e4m3fn; float8_bits the same as uint8,
    # for devices without float8 instructions.
    numbers: Tensor
    # [groups, rows of scales] floating; of nvfp4 bits of e4m3 floats, of mxfp4 exponents of two plus 127, four rows
    # (`height`) in an int32, since bytes alone would not be prefetched.
    scales: Tensor
    # [groups, out] uint8; of table4 the table [16] float32; of nvfp4 [out] float32, which multiplies a row's sums;
    # None: floats.
    zeros: Tensor | None
    group: int
    height: int
    depth: int

    @classmethod
    def of_plain(cls, weight: Tensor) -> Matrix:
        """Wrap [..., out, depth] of the activations' type."""
        depth = weight.shape[-1]
        return cls("plain", weight, weight.new_ones(1, 1), None, depth, 1, depth)

    @property
    def width(self) -> int:
        """The number of results."""
        return self.numbers.shape[-2]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-2]

    def within(self, depth: int) -> int:
        """Return how many columns of a tile surely share a scale."""
        return depth if self.num_groups == 1 else min(depth, self.group & -self.group)


def stacked(matrices: Sequence[Matrix]) -> Matrix | None:
    """Stack matrices of one shape and kind; None if they differ."""
    first = matrices[0]
    if any(_likeness(matrix) != _likeness(first) for matrix in matrices):
        return None
    zeros = None if first.zeros is None else torch.stack([m.zeros for m in matrices if m.zeros is not None])
    numbers, scales = torch.stack([m.numbers for m in matrices]), torch.stack([m.scales for m in matrices])
    return replace(first, numbers=numbers, scales=scales, zeros=zeros)


def _likeness(matrix: Matrix) -> tuple[object, ...]:
    scales = (matrix.scales.shape, matrix.scales.dtype, matrix.group, matrix.height)
    return matrix.kind, matrix.numbers.shape, matrix.depth, *scales


def matrix_kind(numbers: Tensor, depth: int, *, has_float8: bool) -> tuple[Kind, Tensor]:
    """Return the kind of a matrix with `depth` columns, and its numbers for kernels."""
    if numbers.dtype == torch.float8_e4m3fn:
        return ("float8", numbers) if has_float8 else ("float8_bits", numbers.view(torch.uint8))
    return ("codes8" if numbers.shape[-1] == depth else "codes4"), numbers


@triton.jit
def float8_of_bits(raw):
    """e4m3 floats of uint8, exactly, as float32."""
    bits = raw.to(tl.int32)
    return (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * _FLOAT8_FACTOR


@triton.jit
def group_values(
    scales, zeros, column, start, width, depth, group, height, num_scales,
    KIND: tl.constexpr, GROUPS: tl.constexpr, WITHIN: tl.constexpr, WHOLE_ROWS: tl.constexpr,
):  # fmt: skip
    """Return scales and zeros, float32 [columns, GROUPS], of the tile from `start` on.

    With WHOLE_ROWS the caller applies a row's one scale to its sums.
    """
    inner = start + tl.arange(0, GROUPS) * WITHIN
    number = inner // group
    inside = (column < width)[:, None] & (inner < depth)[None, :]
    zero = tl.zeros([column.shape[0], GROUPS], tl.float32)
    scale = zero
    if not WHOLE_ROWS:
        scale = tl.load(scales + number[None, :] * num_scales + (column // height)[:, None], mask=inside, other=0.0)
        if KIND == "nvfp4" or KIND == "mxfp4":
            scale = (scale >> (column % 4 * 8)[:, None]) & 255
        if KIND == "nvfp4":
            scale = float8_of_bits(scale)
        elif KIND == "mxfp4":
            scale = tl.maximum(scale << 23, _LEAST_POWER_BITS).to(tl.float32, bitcast=True)
        else:
            scale = scale.to(tl.float32)
    if KIND == "codes4" or KIND == "codes8":
        zero = tl.load(zeros + number[None, :] * width + column[:, None], mask=inside, other=0).to(tl.float32) + _WHOLE
    return scale, zero


@triton.jit
def decoded(raw, scale, zero, zeros, like, KIND: tl.constexpr, WHOLE_ROWS: tl.constexpr):
    """Decode [columns, n] of a tile to the type of `like`, rounded once; of 4 bits one half."""
    # A table is looked up in shared memory: `tl.load` would be prefetched instead of the codes that it waits for.
    COLUMNS: tl.constexpr = raw.shape[0]
    WIDTH: tl.constexpr = raw.shape[1]
    GROUPS: tl.constexpr = scale.shape[1]
    if KIND == "float8":
        values = raw.to(tl.float32)
    elif KIND == "float4" or KIND == "nvfp4" or KIND == "mxfp4":
        bits = raw.to(tl.int32)
        values = (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * _FLOAT4_FACTOR
    elif KIND == "table4":
        places = tl.reshape(raw.to(tl.int32), (COLUMNS * WIDTH,))
        values = tl.reshape(tl.gather(tl.load(zeros + tl.arange(0, 16)), places, 0), (COLUMNS, WIDTH))
    elif KIND == "float8_bits":
        values = float8_of_bits(raw)
    else:
        values = (raw.to(tl.int32) | _WHOLE_BITS).to(tl.float32, bitcast=True)
    values = tl.reshape(values, (COLUMNS, GROUPS, WIDTH // GROUPS))
    if KIND == "codes4" or KIND == "codes8":
        values -= zero[:, :, None]
    if not WHOLE_ROWS:
        values *= scale[:, :, None]
    return tl.reshape(values, (COLUMNS, WIDTH)).to(like.dtype)


@triton.jit
def halves(rows, DEPTH: tl.constexpr):
    """Split `rows` [n, DEPTH] into even and odd columns."""
    return tl.split(tl.reshape(rows, (rows.shape[0], DEPTH // 2, 2)))
