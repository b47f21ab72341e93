"""Puts every (token, chosen expert) pair, a slot, into a tile of its expert."""

# How many tiles there are is known on the device alone: the grid has room for the most there can be, and the rest end
# at once. Nothing waits for the device.
#
# Few slots: `_place`, one launch, whose programs each walk all slots. Many, of prompts: `_count` counts the slots of
# each chunk by expert, `_reserve` turns the counts into places, and `_list` writes every slot to its place.

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_server.kernels.decoding import Kind

MOST_WALKED = 4096
"""Slots up to which each expert's program walks all of them, which is faster than three launches."""
_WALK = 1024
_CHUNK = 256
# Chunks whose counts are read at once.
_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Sizes of a program's work; gated `columns` are half gate, half up."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


# By rows, for 2-byte numbers: the first is for decode, where few tokens meet in an expert and reading weights is all;
# the last for prompts, where products are. All fit the 99 KiB of the smaller GPUs.
TILES = (
    TileConfig(16, 64, 128, 4, 4),
    TileConfig(32, 64, 128, 4, 3),
    TileConfig(64, 128, 64, 4, 3),
    TileConfig(128, 128, 64, 8, 3),
)
# float32 keeps one depth: sums of a row then have one order at every number of tokens.
FLOAT32_TILES = (TileConfig(16, 64, 32, 4, 3), TileConfig(32, 64, 32, 4, 3), TileConfig(64, 64, 32, 4, 3))


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots, token * top_k + place, in tiles of `tiles.rows` rows; larger numbers are padding."""

    slots: Tensor  # [num_tiles * rows] int32
    experts: Tensor  # [num_tiles] int32, -1: not in use
    top_k: int
    num_slots: int
    tiles: TileConfig


def place(chosen: Tensor, num_experts: int, tiles: TileConfig) -> Placement:
    """Sort the slots of `chosen` [n, top_k] int64 into tiles."""
    num_slots = chosen.numel()
    reached = min(num_slots, num_experts)
    num_tiles = min(num_slots, (num_slots + reached * (tiles.rows - 1)) // tiles.rows)
    slots = torch.empty(num_tiles * tiles.rows, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=chosen.device)
    chosen = chosen.contiguous()
    size = triton.next_power_of_2(num_experts + 1)
    if num_slots <= MOST_WALKED:
        _place[(num_experts,)](chosen, slots, experts, num_slots, num_tiles, ROWS=tiles.rows, EXPERTS=size, CHUNK=_WALK)
    else:
        chunks = triton.cdiv(num_slots, _CHUNK)
        counts = torch.empty(chunks, num_experts, dtype=torch.int32, device=chosen.device)
        places = torch.empty_like(counts)
        _count[(chunks,)](chosen, counts, num_slots, num_experts, EXPERTS=size, CHUNK=_CHUNK)
        _reserve[(num_experts,)](
            counts, places, slots, experts, num_slots, num_tiles, chunks,
            ROWS=tiles.rows, EXPERTS=size, CHUNKS=_CHUNKS,
        )  # fmt: skip
        _list[(chunks,)](chosen, places, slots, num_slots, num_experts, CHUNK=_CHUNK)
    return Placement(slots, experts, chosen.shape[1], num_slots, tiles)


def tiles_for(num_slots: int, num_experts: int, configs: Sequence[TileConfig]) -> TileConfig:
    """Return the smallest config that holds an expert's equal share."""
    share = -(-num_slots // num_experts)
    return next((tiles for tiles in configs if share <= tiles.rows), configs[-1])


def tile_configs(dtype: torch.dtype, kinds: Collection[Kind] = ()) -> tuple[TileConfig, ...]:
    """List what suits `dtype` and these kinds, the smallest first."""
    if dtype == torch.float32:
        return FLOAT32_TILES
    # With tables the smallest tiles gave wrong sums on an H200 (Triton 3.6), each time the same ones, and neither a
    # race nor a wrong access is behind it; the next larger ones were right.
    return TILES[1:] if "table4" in kinds else TILES


@triton.jit
def _share(counts, number, expert, ROWS: tl.constexpr):
    """Return an expert's first tile, tiles and slots."""
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(number < expert, tiles, 0), 0)
    own = tl.sum(tl.where(number == expert, tiles, 0), 0)
    return first, own, tl.sum(tl.where(number == expert, counts, 0), 0)


@triton.jit
def _own_tiles(slots, experts, expert, num_experts, first, own, count, num_slots, num_tiles, ROWS: tl.constexpr):
    """Write an expert's tiles and padding; the last one marks unused tiles."""
    tile = tl.full([], 0, tl.int32)
    while tile < own:
        index = tile + tl.arange(0, 128)
        tl.store(experts + first + index, expert, mask=index < own)
        tile += 128
    if expert == num_experts - 1:
        tile = first + own
        while tile < num_tiles:
            index = tile + tl.arange(0, 128)
            tl.store(experts + index, -1, mask=index < num_tiles)
            tile += 128
    padding = count + tl.arange(0, ROWS)
    tl.store(slots + first * ROWS + padding, num_slots, mask=padding < own * ROWS)


@triton.jit(do_not_specialize=["num_slots", "num_tiles"])
def _place(
    chosen, slots, experts, num_slots, num_tiles, ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr
):
    """Count all slots, and list an expert's own."""
    expert = tl.program_id(0)
    num_experts = tl.num_programs(0)
    number = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < num_slots:
        slot = start + tl.arange(0, CHUNK)
        # Past the end: an expert that there is not.
        given = tl.load(chosen + slot, mask=slot < num_slots, other=EXPERTS - 1).to(tl.int32)
        counts += tl.histogram(given, EXPERTS)
        start += CHUNK
    counts = tl.where(number < num_experts, counts, 0)
    first, own, count = _share(counts, number, expert, ROWS)
    _own_tiles(slots, experts, expert, num_experts, first, own, count, num_slots, num_tiles, ROWS)
    seen = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < num_slots:
        slot = start + tl.arange(0, CHUNK)
        given = tl.load(chosen + slot, mask=slot < num_slots, other=EXPERTS - 1).to(tl.int32)
        mine = given == expert
        rank = seen + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(slots + first * ROWS + rank, slot, mask=mine)
        seen += tl.sum(mine.to(tl.int32), 0)
        start += CHUNK


@triton.jit(do_not_specialize=["num_slots"])
def _count(chosen, counts, num_slots, num_experts, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Count a chunk's slots by expert: [chunks, num_experts]."""
    chunk = tl.program_id(0)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    given = tl.load(chosen + slot, mask=slot < num_slots, other=EXPERTS - 1).to(tl.int32)
    number = tl.arange(0, EXPERTS)
    tl.store(counts + chunk * num_experts + number, tl.histogram(given, EXPERTS), mask=number < num_experts)


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "num_chunks"])
def _reserve(
    counts, places, slots, experts, num_slots, num_tiles, num_chunks,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Find where an expert's slots of each chunk begin: [chunks, num_experts]."""
    expert = tl.program_id(0)
    num_experts = tl.num_programs(0)
    number = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < num_chunks:
        chunk = start + tl.arange(0, CHUNKS)
        inside = (chunk < num_chunks)[:, None] & (number < num_experts)[None, :]
        total += tl.sum(tl.load(counts + chunk[:, None] * num_experts + number[None, :], mask=inside, other=0), axis=0)
        start += CHUNKS
    first, own, count = _share(total, number, expert, ROWS)
    _own_tiles(slots, experts, expert, num_experts, first, own, count, num_slots, num_tiles, ROWS)
    place = first * ROWS
    start = tl.full([], 0, tl.int32)
    while start < num_chunks:
        chunk = start + tl.arange(0, 128)
        at = chunk * num_experts + expert
        own_counts = tl.load(counts + at, mask=chunk < num_chunks, other=0)
        tl.store(places + at, place + tl.cumsum(own_counts, 0) - own_counts, mask=chunk < num_chunks)
        place += tl.sum(own_counts, 0)
        start += 128


@triton.jit(do_not_specialize=["num_slots"])
def _list(chosen, places, slots, num_slots, num_experts, CHUNK: tl.constexpr):
    """Write a chunk's slots behind those of their experts before it."""
    chunk = tl.program_id(0)
    index = tl.arange(0, CHUNK)
    slot = chunk * CHUNK + index
    used = slot < num_slots
    given = tl.load(chosen + slot, mask=used, other=0).to(tl.int32)
    rank = tl.zeros([CHUNK], tl.int32)
    for start in range(0, CHUNK, 32):
        other = start + tl.arange(0, 32)
        others = tl.load(chosen + chunk * CHUNK + other, mask=chunk * CHUNK + other < num_slots, other=-1).to(tl.int32)
        is_before = (given[:, None] == others[None, :]) & (other[None, :] < index[:, None])
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(slots + tl.load(places + chunk * num_experts + given, mask=used, other=0) + rank, slot, mask=used)
