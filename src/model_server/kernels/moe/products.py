"""Products of tokens with their experts: one launch for all experts."""

# A tile's rows are gathered where they are multiplied, so nothing is sorted or copied, and an expert without tokens
# costs nothing. No float is added in an order that depends on timing. `_multiply` runs twice: up (gate and up together,
# SiLU if asked for), then down (times the routing weights). Quantized matrices are decoded tile by tile.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.decoding import Matrix, decoded, group_values, halves
from model_server.kernels.moe.adapters import Shrunk, adjusted, expanded, numbers_of, rank_step
from model_server.kernels.moe.placement import Placement
from model_server.kernels.product import product


def multiply(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    placement: Placement,
    *,
    per_token: bool,
    silu: bool = False,
    scale_input: Tensor | None = None,
    scale_output: Tensor | None = None,
    adapters: Shrunk | None = None,
) -> Tensor:
    """Multiply each slot's row by its expert's matrix: [num_slots, out] in the type of `x`.

    Args:
        x: [n, in] if `per_token`, else [num_slots, in]; float32 is multiplied without TF32.
        weight: [experts, out, in]; bias: [experts, out].
        silu: Return silu(gate) * up, [num_slots, out / 2], of the rows' halves.
        scale_input: [n, top_k] float32, as scale_output.
        adapters: Added before `silu` and scales.
    """
    tiles = placement.tiles
    width, depth = weight.width, weight.depth
    out_width = width // 2 if silu else width
    columns = tiles.columns // 2 if silu else tiles.columns
    out = torch.empty(placement.num_slots, out_width, dtype=x.dtype, device=x.device)
    scale = scale_input if scale_input is not None else scale_output
    added = _added(adapters, placement)
    _multiply[(triton.cdiv(out_width, columns), len(placement.experts))](
        x.contiguous(), weight.numbers, weight.scales, weight.numbers if weight.zeros is None else weight.zeros,
        x if bias is None else bias, out, placement.slots, placement.experts,
        x if scale is None else scale.contiguous(), placement.num_slots, out_width, depth,
        placement.top_k if per_token else 1, weight.group, weight.height, weight.num_groups, weight.scales.shape[-1],
        *added.arguments,
        KIND=weight.kind, GROUPS=tiles.depth // weight.within(tiles.depth), WHOLE_ROWS=weight.num_groups == 1,
        ROWS=tiles.rows, COLUMNS=columns, DEPTH=tiles.depth,
        SILU=silu, BIASED=bias is not None, SCALE_INPUT=scale_input is not None,
        SCALE_OUTPUT=scale_output is not None, EVEN=depth % tiles.depth == 0, **added.constants,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


class _Added(NamedTuple):
    arguments: tuple[object, ...]
    constants: dict[str, object]


def _added(adapters: Shrunk | None, placement: Placement) -> _Added:
    """Arguments and constants of `_multiply` for adapters."""
    if adapters is None:
        unused = placement.slots
        constants: dict[str, object] = {"ADAPTED": False, "AFFINE": False, "MODULES": 1, "RANK": 16}
        return _Added((unused, unused, unused, unused, 1, 1, 1, 1, 1), constants)
    found, sums = adapters.matrices, adapters.sums
    num_experts, modules, rank = found.a.shape[1:4]
    affine = found.b if found.affine is None else found.affine
    return _Added(
        (sums, found.b, affine, adapters.numbers, placement.top_k, len(sums), sums.shape[2], rank, num_experts),
        {"ADAPTED": True, "AFFINE": found.affine is not None, "MODULES": modules, "RANK": rank_step(rank)},
    )


@triton.jit
def _add_decoded(
    total, given, numbers, scales, zeros, column, inside, start, width, depth, group, height, num_scales,
    KIND: tl.constexpr, DEPTH: tl.constexpr, GROUPS: tl.constexpr, WHOLE_ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add given [rows, DEPTH] @ an expert's quantized columns from `start` to total [rows, columns]."""
    PAIRS: tl.constexpr = KIND != "plain" and KIND != "codes8" and KIND != "float8" and KIND != "float8_bits"
    PER_BYTE: tl.constexpr = 2 if PAIRS else 1
    byte = start // PER_BYTE + tl.arange(0, DEPTH // PER_BYTE)
    num_bytes = depth // PER_BYTE
    at = numbers + column[:, None].to(tl.int64) * num_bytes + byte[None, :]
    read = inside[:, None] if EVEN else inside[:, None] & (byte < num_bytes)[None, :]
    raw = tl.load(at, mask=read, other=0.0)
    scale, zero = group_values(
        scales, zeros, column, start, width, depth, group, height, num_scales,
        KIND=KIND, GROUPS=GROUPS, WITHIN=DEPTH // GROUPS, WHOLE_ROWS=WHOLE_ROWS,
    )  # fmt: skip
    if PAIRS:
        even, odd = halves(given, DEPTH)
        total = product(even, tl.trans(decoded(raw & 15, scale, zero, zeros, given, KIND, WHOLE_ROWS)), total)
        return product(odd, tl.trans(decoded(raw >> 4, scale, zero, zeros, given, KIND, WHOLE_ROWS)), total)
    else:
        return product(given, tl.trans(decoded(raw, scale, zero, zeros, given, KIND, WHOLE_ROWS)), total)


@triton.jit(do_not_specialize=["num_slots", "shared_by", "height", "top_k", "num_parts"])
def _multiply(
    x,
    weight,
    weight_scales,
    zeros,
    bias,
    out,
    slots,
    experts,
    scales,
    num_slots,
    width,
    depth,
    shared_by,
    group,
    height,
    num_groups,
    num_scales,
    sums,
    lora_b,
    affine,
    numbers,
    top_k,
    num_parts,
    values,
    rank,
    num_experts,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SILU: tl.constexpr,
    BIASED: tl.constexpr,
    SCALE_INPUT: tl.constexpr,
    SCALE_OUTPUT: tl.constexpr,
    EVEN: tl.constexpr,
    ADAPTED: tl.constexpr,
    AFFINE: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    slot = tl.load(slots + tile * ROWS + tl.arange(0, ROWS))
    used = slot < num_slots
    row = tl.where(used, slot // shared_by, 0).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    all_rows = width * 2 if SILU else width
    PAIRS: tl.constexpr = KIND != "plain" and KIND != "codes8" and KIND != "float8" and KIND != "float8_bits"
    matrix = weight + expert * all_rows * (depth // 2 if PAIRS else depth)
    weight_scales += expert * num_groups * num_scales
    zeros += expert * (16 if KIND == "table4" else all_rows if KIND == "nvfp4" else num_groups * all_rows)
    left = x + row[:, None] * depth + inner[None, :]
    right = matrix + column[None, :].to(tl.int64) * depth + inner[:, None]
    to_up = width.to(tl.int64) * depth
    inside = column < width
    if SCALE_INPUT:
        scale = tl.load(scales + slot, mask=used, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        left_over = inner < depth - start
        if EVEN:
            a = tl.load(left + start, mask=used[:, None], other=0.0)
        else:
            a = tl.load(left + start, mask=used[:, None] & left_over[None, :], other=0.0)
        if SCALE_INPUT:
            a = (a.to(tl.float32) * scale[:, None]).to(a.dtype)
        if KIND != "plain":
            total = _add_decoded(
                total, a, matrix, weight_scales, zeros, column, inside, start, all_rows, depth, group, height,
                num_scales, KIND=KIND, DEPTH=DEPTH, GROUPS=GROUPS, WHOLE_ROWS=WHOLE_ROWS, EVEN=EVEN,
            )  # fmt: skip
            if SILU:
                total_up = _add_decoded(
                    total_up, a, matrix, weight_scales, zeros, width + column, inside, start, all_rows, depth, group,
                    height, num_scales, KIND=KIND, DEPTH=DEPTH, GROUPS=GROUPS, WHOLE_ROWS=WHOLE_ROWS, EVEN=EVEN,
                )  # fmt: skip
        else:
            read = inside[None, :] if EVEN else inside[None, :] & left_over[:, None]
            total = product(a, tl.load(right + start, mask=read, other=0.0), total)
            if SILU:
                total_up = product(a, tl.load(right + to_up + start, mask=read, other=0.0), total_up)
    if KIND != "plain" and WHOLE_ROWS:
        total *= tl.load(weight_scales + column // height, mask=inside, other=0.0).to(tl.float32)[None, :]
        if SILU:
            at_up = weight_scales + (width + column) // height
            total_up *= tl.load(at_up, mask=inside, other=0.0).to(tl.float32)[None, :]
    if KIND == "nvfp4":
        total *= tl.load(zeros + column, mask=inside, other=0.0)[None, :]
        if SILU:
            total_up *= tl.load(zeros + width + column, mask=inside, other=0.0)[None, :]
    if BIASED:
        biases = bias + expert * all_rows
        total += tl.load(biases + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        if SILU:
            total_up += tl.load(biases + width + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ADAPTED:
        number, lowest, highest = numbers_of(numbers, slot, used, top_k)
        first_half = inside & (column < all_rows // 2) if MODULES == 2 and not SILU else inside
        total = expanded(
            total, sums, lora_b, slot, number, lowest, highest, expert, column, first_half, 0, num_slots, num_parts,
            values, rank, all_rows, num_experts, RANK=RANK,
        )  # fmt: skip
        if MODULES == 2 and not SILU:
            total = expanded(
                total, sums, lora_b, slot, number, lowest, highest, expert, column, inside & (column >= all_rows // 2),
                rank, num_slots, num_parts, values, rank, all_rows, num_experts, RANK=RANK,
            )  # fmt: skip
        if SILU:
            total_up = expanded(
                total_up, sums, lora_b, slot, number, lowest, highest, expert, width + column, inside,
                rank * (MODULES - 1), num_slots, num_parts, values, rank, all_rows, num_experts, RANK=RANK,
            )  # fmt: skip
        if AFFINE:
            total = adjusted(total, affine, number, expert, column, inside, all_rows, num_experts)
            if SILU:
                total_up = adjusted(total_up, affine, number, expert, width + column, inside, all_rows, num_experts)
    if SILU:
        total = total * tl.sigmoid(total) * total_up
    if SCALE_OUTPUT:
        total *= tl.load(scales + slot, mask=used, other=0.0)[:, None]
    at = out + slot[:, None].to(tl.int64) * width + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=used[:, None] & inside[None, :])
