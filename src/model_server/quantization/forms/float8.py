"""8-bit floats (e4m3) with float32 scales of the matrix, rows, or blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, slots=True)
class Fp8:
    """Element (i, k) is `weight[i, k] * scales[i // block[0], k // block[1]]`; edge blocks may be short."""

    # [out, in] float8_e4m3fn.
    weight: Tensor
    scales: Tensor
    block: tuple[int, int]
    # Made for 8-bit activations: a product may quantize its inputs.
    float8_inputs: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def kind(self) -> str:
        if self.scales.numel() == 1:
            return "fp8, one scale a matrix"
        height, width = self.block
        return "fp8, a scale a row" if self.scales.shape[1] == height == 1 else f"fp8, blocks of {height} x {width}"

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes

    def rows(self, start: int, stop: int) -> Fp8:
        """Return rows [start, stop) in shared memory."""
        height, width = self.block
        first, last = start // height, -(-stop // height)
        if start % height == 0:
            scales = self.scales[first:last]
        elif last - first == 1:
            scales, height = self.scales[first:last], stop - start
        else:
            scales = self.scales[first:last].repeat_interleave(height, 0)[start - first * height :][: stop - start]
            height = 1
        return replace(self, weight=self.weight[start:stop], scales=scales, block=(height, width))

    def permuted(self, rows: Tensor) -> Fp8:
        """Return the rows `rows` [n] int64."""
        scales, height = rows_of_blocks(self.scales, self.block[0], rows)
        return replace(self, weight=self.weight.index_select(0, rows), scales=scales, block=(height, self.block[1]))

    def scales_of_rows(self) -> Tensor:
        height, num_rows = self.block[0], self.shape[0]
        return self.scales if height == 1 else self.scales.repeat_interleave(height, 0)[:num_rows]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Multiply in float32, rounded once to `dtype`."""
        weight = self.weight.float()
        height, width = self.block
        across = self.scales if self.scales.shape[1] == 1 else self.scales.repeat_interleave(width, 1)
        across = across[:, : weight.shape[1]]
        if height == 1:
            weight.mul_(across)
        else:
            for block, scales in enumerate(across):
                weight[block * height : (block + 1) * height].mul_(scales)
        return weight.to(dtype)


def quantize_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [n, in] as float8_e4m3fn, and scales [n, 1] float32."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).div_(FP8_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
    return (wide / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def quantize_rows(weight: Tensor, largest: Tensor) -> Fp8:
    """Quantize `weight` [out, in] with a scale a row.

    Args:
        largest: [out] float32: of whole rows, which may be longer than `weight`.
    """
    scales = (largest / FP8_MAX).unsqueeze(1)
    scaled = (weight.float() / torch.where(scales > 0, scales, 1.0)).clamp_(-FP8_MAX, FP8_MAX)
    return Fp8(scaled.to(torch.float8_e4m3fn), scales, (1, weight.shape[1]))


def rows_of_blocks(scales: Tensor, height: int, rows: Tensor) -> tuple[Tensor, int]:
    """Return the scales of chosen rows [n] int64, and the rows of each: whole blocks if possible, else one."""
    blocks = rows // height
    for kept in (len(rows), height):
        heads = blocks[::kept]
        if kept > 1 and torch.equal(blocks, heads.repeat_interleave(kept)[: len(rows)]):
            return scales[heads], kept
    return scales[blocks], 1


def columns_of_blocks(scales: Tensor, width: int, columns: tuple[int, int]) -> tuple[Tensor, int]:
    """Return the scales of columns [start, stop), and the columns of each; a cut block's scale is repeated."""
    start, stop = columns
    if start // width == (stop - 1) // width:
        block = start // width
        return scales[..., block : block + 1], stop - start
    divided = math.gcd(start, width)
    firsts = torch.arange(start, stop, divided, device=scales.device)
    return scales[..., firsts // width], divided


def cat(forms: Sequence[Fp8]) -> Fp8:
    """Join matrices of one width, keeping the finest blocks where they are in line."""
    if len(forms) == 1:
        return forms[0]
    width = math.gcd(*(form.block[1] for form in forms))
    if all(form.scales.shape[1] == 1 for form in forms):
        width = forms[0].shape[1]
    height = forms[0].block[0]
    in_line = all(form.block[0] == height for form in forms) and all(f.shape[0] % height == 0 for f in forms[:-1])
    return Fp8(
        torch.cat([form.weight for form in forms]),
        torch.cat([_finer(form, height if in_line else 1, width) for form in forms]),
        (height if in_line else 1, width),
        all(form.float8_inputs for form in forms),
    )


def _finer(form: Fp8, height: int, width: int) -> Tensor:
    """Repeat scales for smaller blocks."""
    num_rows, num_columns = form.shape
    scales = form.scales
    if height != form.block[0]:
        scales = scales.repeat_interleave(form.block[0], 0)[:num_rows]
    if width != form.block[1]:
        firsts = torch.arange(0, num_columns, width, device=scales.device)
        scales = scales[:, firsts // form.block[1]]
    return scales
