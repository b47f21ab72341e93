"""RMS and layer norms of rows, with the residual sum before them, in one pass.

Whole rows are in registers, several at once if small (heads).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.dependent import after_previous, early_launch

# Numbers that a program holds at least. No fewer than its threads: where several threads held the same number of a sum
# that is stored over what was added, one of them could read it too late.
SMALLEST_TILE = 1024
LARGEST_ROW = 65536


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` in float32 inside.

    Args:
        x: [n, size] or [n, heads, size], last dimension contiguous.
        weight: [size] or [heads, size] float32, contiguous.
    """
    return _norm(x, None, weight, None, eps, center=False)


def add_rms_norm(hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum, in the memory of `added`, and its norm, of the rounded sum [n, size]."""
    return added, _norm(hidden, added, weight, None, eps, center=False)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, as `rms_norm`."""
    return _norm(x, None, weight, bias, eps, center=True)


def add_layer_norm(
    hidden: Tensor, added: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sum as `add_rms_norm`, and its `layer_norm`."""
    return added, _norm(hidden, added, weight, bias, eps, center=True)


def _norm(
    x: Tensor, added: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, *, center: bool
) -> Tensor:
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    _check(x, added, (weight, bias), heads)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.shape[0] * heads
    if num_rows == 0:
        return out
    block, rows, warps = _tile(size)
    norm_rows[(triton.cdiv(num_rows, rows),)](
        x, added, weight, bias, out, num_rows,
        x.stride(0), x.stride(1) if x.dim() == 3 else 0, 0 if added is None else added.stride(0), eps,
        HEADS=heads, SIZE=size, BLOCK=block, ROWS=rows, CENTER=center,
        PER_HEAD=weight is not None and weight.dim() == 2, num_warps=warps, **early_launch(x.device),
    )  # fmt: skip
    return out


def _tile(size: int) -> tuple[int, int, int]:
    """Return a program's columns, rows and warps."""
    block = triton.next_power_of_2(size)
    return block, max(SMALLEST_TILE // block, 1), 4 if block <= 2048 else 8 if block <= 4096 else 16


def _check(x: Tensor, added: Tensor | None, parameters: tuple[Tensor | None, ...], heads: int) -> None:
    size = x.shape[-1]
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or not 0 < size <= LARGEST_ROW:
        raise ValueError(f"no kernel for the norm of a tensor of shape {tuple(x.shape)}, strides {x.stride()}")
    if added is not None and (x.dim() != 2 or added.shape != x.shape or added.stride(1) != 1):
        raise ValueError(f"no kernel for a sum of shapes {tuple(x.shape)} and {tuple(added.shape)}")
    if added is not None and added.dtype != x.dtype:
        raise ValueError(f"no kernel for a sum of {x.dtype} and {added.dtype}")
    given = [t for t in parameters if t is not None]
    for t in given:
        if t.shape not in ((size,), (heads, size)) or t.dim() != given[0].dim() or not t.is_contiguous():
            raise ValueError(f"a weight of shape {tuple(t.shape)} does not fit {tuple(x.shape)}")


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x, added, weight, bias, out, num_rows, x_stride, x_head_stride, added_stride, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    CENTER: tl.constexpr, PER_HEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows)[:, None] & (column < SIZE)
    after_previous(EARLY)
    value = tl.load(x + (token * x_stride + head * x_head_stride)[:, None] + column, mask=mask, other=0.0)
    if added is not None:
        place = added + (token * added_stride)[:, None] + column
        value = (value.to(tl.float32) + tl.load(place, mask=mask, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(place, value, mask=mask)
    wide = value.to(tl.float32)
    if CENTER:
        wide = tl.where(mask, wide - (tl.sum(wide, axis=1) / SIZE)[:, None], 0.0)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)[:, None]
    parameter = column + (head * SIZE)[:, None] if PER_HEAD else column
    present = mask if PER_HEAD else column < SIZE
    if weight is not None:
        wide = wide * tl.load(weight + parameter, mask=present, other=0.0).to(tl.float32)
    if bias is not None:
        wide = wide + tl.load(bias + parameter, mask=present, other=0.0).to(tl.float32)
    tl.store(out + (row.to(tl.int64) * SIZE)[:, None] + column, wide.to(out.dtype.element_ty), mask=mask)
