"""Norm, rotations and cache of latent attention in one kernel.

A token's first program norms its latent, rotates the shared key and stores both; others rotate queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.cache_writes.rope import FLOAT8

# Numbers of queries that a program rotates, at least.
_TILE = 1024


def latent_write(
    latent: Tensor,
    weight: Tensor,
    eps: float,
    rotated: Tensor,
    turned: Tensor,
    table: Tensor,
    positions: Tensor,
    rows: Tensor,
    slots: Tensor,
) -> Tensor:
    """Compute `layers.fused.Fused.latent_write` of an RMS norm.

    Args:
        weight: [rank] float32, contiguous.
        table: [num_positions, dim] float32, contiguous, cos and sin of every pair in turn.
        positions: [n] int64.
    """
    num_tokens, width = latent.shape
    rank, dim = len(weight), table.shape[1]
    heads = rotated.shape[1]
    if rank + dim != width or rotated.shape != (num_tokens, heads, dim) or turned.shape != rotated.shape:
        raise ValueError(
            f"no kernel for latents {tuple(latent.shape)} and rotated parts {tuple(rotated.shape)} of queries, written "
            f"to {tuple(turned.shape)}, with a norm of {rank} and rotations of {dim}"
        )
    if rows.shape[1:] != (width,) or (latent.stride(1), rotated.stride(2), turned.stride(2)) != (1, 1, 1):
        raise ValueError(f"no kernel for strides {latent.stride()}, {rotated.stride()}, {turned.stride()}")
    out = torch.empty(latent.shape, dtype=latent.dtype, device=latent.device)
    if num_tokens == 0:
        return out
    sizes = _sizes(rank, dim)
    latent_write_heads[(num_tokens, 1 + triton.cdiv(heads, sizes["HEADS"]))](
        latent, weight, rotated, turned, table, positions, rows, slots, out,
        latent.stride(0), rotated.stride(0), rotated.stride(1), turned.stride(0), turned.stride(1), rows.stride(0), eps,
        NUM_HEADS=heads, RANK=rank, DIM=dim,
        LARGEST=torch.finfo(rows.dtype).max if rows.dtype in FLOAT8 else None, **sizes,
    )  # fmt: skip
    return out


def _sizes(rank: int, dim: int) -> dict[str, int]:
    """Return a latent's and a rotated part's sizes, and heads of a program."""
    block = triton.next_power_of_2(dim)
    return {"LATENT": triton.next_power_of_2(rank), "BLOCK": block, "HEADS": max(_TILE // block, 1)}


@triton.jit
def _kept(value, rows, LARGEST: tl.constexpr):
    """Return `value` as the cache stores it; comparisons let NaN through."""
    if LARGEST is not None:
        wide = value.to(tl.float32)
        value = tl.where(wide > LARGEST, LARGEST, tl.where(wide < -LARGEST, -LARGEST, wide))
    return value.to(rows.dtype.element_ty)


@triton.jit
def _turned(value, cos, sin, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    even, odd = tl.split(tl.reshape(value.to(tl.float32), (HEADS, BLOCK // 2, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (HEADS, BLOCK)).to(value.dtype)


@triton.jit
def latent_write_heads(
    latent, weight, rotated, turned, table, positions, rows, slots, out,
    latent_stride, rotated_stride, rotated_head_stride, turned_stride, turned_head_stride, row_stride, eps,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, LATENT: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = RANK + DIM
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)[None, :]
    turns = tl.load(table + tl.load(positions + token) * DIM + number, mask=number < DIM, other=0.0)
    cos, sin = tl.split(tl.reshape(turns, (1, BLOCK // 2, 2)))
    if tl.program_id(1) == 0:
        row = rows + tl.load(slots + token) * row_stride
        column = tl.arange(0, LATENT)
        value = tl.load(latent + token * latent_stride + column, mask=column < RANK, other=0.0)
        wide = value.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / RANK + eps)
        value = (wide * tl.load(weight + column, mask=column < RANK, other=0.0)).to(value.dtype)
        tl.store(out + token * WIDTH + column, value, mask=column < RANK)
        tl.store(row + column, _kept(value, rows, LARGEST), mask=column < RANK)
        key = tl.load(latent + token * latent_stride + RANK + number, mask=number < DIM, other=0.0)
        key = _turned(key, cos, sin, 1, BLOCK)
        tl.store(out + token * WIDTH + RANK + number, key, mask=number < DIM)
        tl.store(row + RANK + number, _kept(key, rows, LARGEST), mask=number < DIM)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < NUM_HEADS) & (number < DIM)
        at = rotated + token * rotated_stride + head * rotated_head_stride + number
        query = tl.load(at, mask=inside, other=0.0)
        at = turned + token * turned_stride + head * turned_head_stride + number
        tl.store(at, _turned(query, cos, sin, HEADS, BLOCK), mask=inside)
