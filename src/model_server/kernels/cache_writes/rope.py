"""Norm, rotation and cache of queries, keys and values in one kernel.

A program takes some heads of one token; pairs are side by side, so both numbers are one thread's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.dependent import after_previous, early_launch

# Numbers of a program, at least. As for norms no fewer than its threads: heads are rotated in place.
SMALLEST_TILE = 1024
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def rotate_write(
    qkv: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    table: Tensor | None = None,
    positions: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Norm and rotate queries and keys of `qkv` in place; store keys and values in `rows` at `slots`.

    Args:
        qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim], float16, bfloat16 or float32, last dimension
            contiguous.
        rows: [num_slots, 2 * num_kv_heads * head_dim] of the same type, or float8 (from capability 8.9 on): scaled,
            rounded and bounded.
        slots: [n] int64, each once, or never read.
        table: [num_positions, rotary_dim] float32, contiguous, cos and sin in turn; without it nothing rotates.
        positions: [n] int64.
        weight: Of an RMS norm of heads, [head_dim] or [num_heads + num_kv_heads, head_dim] float32, contiguous;
            None: no norm.
    """
    num_tokens, num_rotated = qkv.shape[0], num_heads + num_kv_heads
    _check(qkv, rows, slots, table, positions, (num_heads, num_kv_heads, head_dim))
    if weight is not None and weight.shape not in ((head_dim,), (num_rotated, head_dim)):
        raise ValueError(f"a weight of shape {tuple(weight.shape)} does not fit {num_rotated} heads of {head_dim}")
    if num_tokens == 0:
        return
    block, heads = _tile(head_dim)
    # Queries that stay as they are need no visit.
    first = num_heads if table is None and weight is None else 0
    total = num_rotated + num_kv_heads
    rotate_write_heads[(num_tokens, triton.cdiv(total - first, heads))](
        qkv, rows, slots, table, positions, weight,
        qkv.stride(0), rows.stride(0), eps, key_scale, value_scale,
        FIRST=first, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=head_dim,
        ROTARY=0 if table is None else table.shape[1], BLOCK=block, HEADS=heads,
        PER_HEAD=weight is not None and weight.dim() == 2,
        LARGEST=torch.finfo(rows.dtype).max if rows.dtype in FLOAT8 else None, **early_launch(qkv.device),
    )  # fmt: skip


def _tile(head_dim: int) -> tuple[int, int]:
    """Return a head's size as held, and heads of a program."""
    block = triton.next_power_of_2(head_dim)
    return block, max(SMALLEST_TILE // block, 1)


def _check(
    qkv: Tensor,
    rows: Tensor,
    slots: Tensor,
    table: Tensor | None,
    positions: Tensor | None,
    sizes: tuple[int, int, int],
) -> None:
    num_heads, num_kv_heads, head_dim = sizes
    num_tokens = qkv.shape[0]
    if qkv.shape[1:] != ((num_heads + 2 * num_kv_heads) * head_dim,) or qkv.stride(1) != 1:
        raise ValueError(f"no kernel for q, k and v of shape {tuple(qkv.shape)}, strides {qkv.stride()}")
    if rows.shape[1:] != (2 * num_kv_heads * head_dim,) or rows.stride(1) != 1:
        raise ValueError(f"no kernel for cache rows of shape {tuple(rows.shape)}, strides {rows.stride()}")
    if rows.dtype != qkv.dtype and rows.dtype not in FLOAT8:
        raise ValueError(f"no kernel for {qkv.dtype} in a cache of {rows.dtype}")
    if slots.shape != (num_tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"slots of shape {tuple(slots.shape)} for {num_tokens} tokens")
    if (table is None) != (positions is None):
        raise ValueError("a table of rotations and positions go together")
    if table is not None and (table.shape[1] % 2 or table.shape[1] > head_dim or not table.is_contiguous()):
        raise ValueError(f"a table of rotations of shape {tuple(table.shape)} for heads of {head_dim}")
    if positions is not None and (positions.shape != (num_tokens,) or positions.dtype != torch.int64):
        raise ValueError(f"positions of shape {tuple(positions.shape)} for {num_tokens} tokens")


@triton.jit
def rotate_write_heads(
    qkv, rows, slots, table, positions, weight, qkv_stride, row_stride, eps, key_scale, value_scale,
    FIRST: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    ROTARY: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, LARGEST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    ROTATED: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = FIRST + tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    number = tl.arange(0, BLOCK)[None, :]
    inside = (head < ROTATED + NUM_KV_HEADS) & (number < DIM)
    rotated = (head < ROTATED) & (number < DIM)
    place = qkv + token * qkv_stride + head * DIM + number
    after_previous(EARLY)
    value = tl.load(place, mask=inside, other=0.0)
    if weight is not None:
        wide = value.to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
        factors = head * DIM + number if PER_HEAD else number
        wide = wide * tl.load(weight + factors, mask=rotated if PER_HEAD else number < DIM, other=0.0)
        value = tl.where(rotated, wide.to(value.dtype), value)
    if ROTARY > 0:
        # What does not rotate is multiplied by 1 + 0i.
        turns = tl.load(
            table + tl.load(positions + token) * ROTARY + number,
            mask=number < ROTARY,
            other=((number + 1) % 2).to(tl.float32),
        )
        cos, sin = tl.split(tl.reshape(turns, (1, BLOCK // 2, 2)))
        even, odd = tl.split(tl.reshape(value.to(tl.float32), (HEADS, BLOCK // 2, 2)))
        turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (HEADS, BLOCK))
        value = tl.where(rotated, turned.to(value.dtype), value)
    if FIRST == 0:
        tl.store(place, value, mask=rotated)
    # A pool may have more than 2^31 numbers: slots are int64.
    kept = rows + tl.load(slots + token) * row_stride + (head - NUM_HEADS) * DIM + number
    if LARGEST is not None:
        scaled = tl.div_rn(value.to(tl.float32), tl.where(head < ROTATED, key_scale, value_scale))
        # Bounds by comparison, which lets NaN through.
        scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
        tl.store(kept, scaled.to(rows.dtype.element_ty), mask=inside & (head >= NUM_HEADS))
    else:
        tl.store(kept, value, mask=inside & (head >= NUM_HEADS))
