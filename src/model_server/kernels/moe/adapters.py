"""What LoRA adapters add to products of experts, over the base model's tiles."""

# The rows of a tile have one expert, and maybe different adapters: each of these is multiplied with the rows that have
# it, the others being 0. `_shrink` multiplies by A; `expanded`, a part of the kernel of the base model's product,
# multiplies what comes of it by B and adds it to the sum, before that is rounded. Rows without an adapter get zeros,
# and keep their bits. Which row has which adapter is read on the device, so that a step can be captured.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.matmul import parts
from model_server.kernels.moe.placement import Placement
from model_server.kernels.product import product

# Of A's rows at a time.
_INNER = 64


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all slots for a product (`adapters.expert_slots.ExpertSlots`)."""

    a: Tensor
    b: Tensor
    affine: Tensor | None


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Rows times A."""

    matrices: ExpertMatrices
    # [parts, pairs, modules * rank] float32, added in this order; only rows with an adapter.
    sums: Tensor
    # [n] int32: each row's, below 0: none.
    numbers: Tensor


def shrink(
    matrices: ExpertMatrices,
    x: Tensor,
    placement: Placement,
    numbers: Tensor,
    *,
    per_token: bool,
    scale_input: Tensor | None,
    num_processors: int,
) -> Shrunk:
    """Multiply by A the rows that `moe.products.multiply` reads.

    Args:
        numbers: [tokens] int32, adapter slots, below 0: none.
    """
    tiles = placement.tiles
    inner, depth = matrices.a.shape[2] * matrices.a.shape[3], matrices.a.shape[4]
    num_tiles, blocks = len(placement.experts), triton.cdiv(inner, _INNER)
    num_parts, share = parts(num_tiles * blocks, depth, tiles.depth, num_processors)
    sums = torch.empty(num_parts, placement.num_slots, inner, dtype=torch.float32, device=x.device)
    _shrink[(num_tiles, blocks * num_parts)](
        x.contiguous(), matrices.a, sums, placement.slots, placement.experts, numbers,
        x if scale_input is None else scale_input.contiguous(),
        placement.num_slots, placement.top_k if per_token else 1, placement.top_k, matrices.a.shape[1], inner, depth,
        share, num_parts,
        ROWS=tiles.rows, INNER=_INNER, DEPTH=tiles.depth, SCALED=scale_input is not None,
        EVEN=depth % tiles.depth == 0, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return Shrunk(matrices, sums, numbers)


def rank_step(rank: int) -> int:
    """Return how much of a sum over `rank` numbers is added at a time."""
    return min(64, max(16, 1 << (rank - 1).bit_length()))


@triton.jit
def numbers_of(numbers, pair, used, top_k):
    """Return each row's adapter, and the least and largest; the least is larger if there are none."""
    number = tl.load(numbers + pair // top_k, mask=used, other=-1)
    lowest = tl.min(tl.where(number >= 0, number, 2147483647), 0)
    return number, lowest, tl.max(number, 0)


@triton.jit(do_not_specialize=["num_pairs", "shared_by", "top_k", "num_parts"])
def _shrink(
    x, a, sums, pairs, experts, numbers, scales, num_pairs, shared_by, top_k, num_experts, inner, depth, share,
    num_parts,
    ROWS: tl.constexpr, INNER: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    part = tl.program_id(1) % num_parts
    pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
    number, lowest, highest = numbers_of(numbers, pair, pair < num_pairs, top_k)
    if highest < 0:
        return
    value = tl.program_id(1) // num_parts * INNER + tl.arange(0, INNER)
    inside = value < inner
    column = tl.arange(0, DEPTH)
    left = x + (pair // shared_by)[:, None].to(tl.int64) * depth + column[None, :]
    if SCALED:
        scale = tl.load(scales + pair, mask=number >= 0, other=0.0)
    total = tl.zeros([ROWS, INNER], tl.float32)
    for slot in range(lowest, highest + 1):
        mine = number == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            right = a + ((slot * num_experts + expert) * inner + value[None, :]) * depth + column[:, None]
            for start in range(part * share, tl.minimum((part + 1) * share, depth), DEPTH):
                rest = column < depth - start
                read = mine[:, None] if EVEN else mine[:, None] & rest[None, :]
                given = tl.load(left + start, mask=read, other=0.0)
                if SCALED:
                    given = (given.to(tl.float32) * scale[:, None]).to(given.dtype)
                wanted = inside[None, :] if EVEN else inside[None, :] & rest[:, None]
                total = product(given, tl.load(right + start, mask=wanted, other=0.0), total)
    at = (part * num_pairs + pair).to(tl.int64)[:, None] * inner + value[None, :]
    tl.store(sums + at, total, mask=(number >= 0)[:, None] & inside[None, :])


@triton.jit
def expanded(
    total, sums, b, pair, number, lowest, highest, expert, column, inside, begin, num_pairs, num_parts, inner, rank,
    height, num_experts, RANK: tl.constexpr,
):  # fmt: skip
    """Add A's results, from `begin` on, times B of each row's adapter to total [rows, columns]."""
    term = tl.arange(0, RANK)
    for slot in range(lowest, highest + 1):
        mine = number == slot
        if tl.max(mine.to(tl.int32), 0) > 0:
            matrix = b + ((slot * num_experts + expert) * height + column[None, :]) * rank
            for start in range(0, rank, RANK):
                rest = term < rank - start
                value = tl.zeros([pair.shape[0], RANK], tl.float32)
                for part in range(num_parts):
                    at = (part * num_pairs + pair).to(tl.int64)[:, None] * inner + begin + start + term[None, :]
                    value += tl.load(sums + at, mask=mine[:, None] & rest[None, :], other=0.0)
                weight = tl.load(matrix + start + term[:, None], mask=rest[:, None] & inside[None, :], other=0.0)
                total = product(value.to(b.dtype.element_ty), weight, total)
    return total


@triton.jit
def adjusted(total, affine, number, expert, column, inside, height, num_experts):
    """Apply each row's gains and shifts to total [rows, columns]."""
    group = (number.to(tl.int64) * num_experts + expert) * 2
    at = affine + group[:, None] * height + column[None, :]
    read = (number >= 0)[:, None] & inside[None, :]
    return total * tl.load(at, mask=read, other=1.0) + tl.load(at + height, mask=read, other=0.0)
