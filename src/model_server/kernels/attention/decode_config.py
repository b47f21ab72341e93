"""How layers are decoded: tiles, and how keys are split."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.kernels.attention.decode_plan import DecodePlan, SplitRule, plan_decode
from model_server.kernels.attention.parts import Tiles, Widths, num_processors, shared_memory, widths_of

# Programs that a step is cut into, per processor: two or three run at a time, the rest evens out what finishes early.
PROGRAMS_PER_PROCESSOR = 8
# Fewer keys than this are not worth a program and its part of the merge.
MIN_KEYS = 128
# The cut of batch-invariant mode, which must follow from a row's own length.
INVARIANT_MIN_KEYS, INVARIANT_SPLITS = 256, 16
# A tile of keys and values in shared memory.
_STAGE_BYTES = 40 * 1024
# Triton's pipeliner shares the stages between the loads of blocks' numbers and those of keys, which need them.
_TWO_BUFFERS, _ONE_BUFFER = 5, 3
_MAX_ROWS = 64
NO_SPLITS = SplitRule(target_items=None, min_keys=1, max_splits=1)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """All of a launch that does not depend on the batch."""

    widths: Widths
    tiles: Tiles
    # Programs that share the query heads of a KV head.
    parts: int
    # Partial results that a merge reads at once.
    unroll: int
    rule: SplitRule
    # Queries of each sequence, which see keys up to their own.
    places: int = 1


def decode_config(
    layer: AttentionLayer,
    *,
    value_in_key: bool,
    cache_dtype: torch.dtype,
    device: torch.device,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    places: int = 1,
) -> DecodeConfig:
    """Choose how a layer is decoded.

    Args:
        num_splits: Items per row at most; None: what keeps the device busy, by all keys of the batch.
        batch_invariant: Rows are cut by their own length alone, at some cost.
    """
    widths = widths_of(layer, value_in_key)
    config = config_of(widths, layer, cache_dtype.itemsize, shared_memory(device), NO_SPLITS, places)
    if num_splits is not None:
        rule = SplitRule(target_items=None, min_keys=1, max_splits=num_splits)
    elif batch_invariant:
        rule = SplitRule(target_items=None, min_keys=INVARIANT_MIN_KEYS, max_splits=INVARIANT_SPLITS)
    else:
        target = max(1, PROGRAMS_PER_PROCESSOR * num_processors(device) // (layer.num_kv_heads * config.parts))
        rule = SplitRule(target_items=target, min_keys=MIN_KEYS, max_splits=target)
    return replace(config, rule=rule)


def config_of(
    widths: Widths, layer: AttentionLayer, cache_itemsize: int, memory: int, rule: SplitRule, places: int = 1
) -> DecodeConfig:
    rows = layer.num_heads // layer.num_kv_heads * places
    tiles = decode_tiles(widths, rows, cache_itemsize, memory)
    per_thread = tiles.rows * widths.value_tile // (32 * tiles.num_warps)
    unroll = 4 if per_thread <= 16 else 2 if per_thread <= 32 else 1
    return DecodeConfig(widths, tiles, triton.cdiv(rows, tiles.rows), unroll, rule, places)


def decode_tiles(widths: Widths, group: int, cache_itemsize: int, memory: int) -> Tiles:
    """Choose tiles for `group` query heads per KV head, within `memory` bytes."""
    rows = min(_MAX_ROWS if cache_itemsize <= 2 else _MAX_ROWS // 2, max(16, int(triton.next_power_of_2(group))))
    key_bytes = widths.key_bytes(cache_itemsize)
    keys = 64 if rows >= 64 else 128
    while keys > 16 and keys * key_bytes > _STAGE_BYTES:
        keys //= 2

    def fits(buffers: int) -> bool:
        beside = rows * (widths.main_tile + widths.rest_tile + keys) * max(cache_itemsize, 2)
        return buffers * keys * key_bytes + beside <= memory

    while rows > 16 and not fits(1):
        rows //= 2
    wide = rows * max(widths.value_tile, widths.main_tile) >= 64 * 128 or cache_itemsize == 4
    return Tiles(rows=rows, keys=keys, num_warps=8 if wide else 4, num_stages=_TWO_BUFFERS if fits(2) else _ONE_BUFFER)


def plan_rows(
    config: DecodeConfig, layer: AttentionLayer, kv_lengths: Tensor, cu_seqlens_q: Tensor, num_rows: int
) -> DecodePlan:
    """Plan a step for all layers of this config and reach.

    Args:
        num_rows: Single queries; those of a sequence follow each other.
    """
    if config.places > 1:
        assert layer.window is None and layer.chunk is None, "places may see different first keys"
        num_rows //= config.places
        kv_lengths = kv_lengths.view(num_rows, config.places).amax(1)
        cu_seqlens_q = torch.arange(num_rows + 1, dtype=torch.int32, device=kv_lengths.device)
    return plan_decode(
        kv_lengths,
        cu_seqlens_q,
        num_rows=num_rows,
        tiles_per_row=layer.num_kv_heads * config.parts,
        rule=config.rule,
        unit=config.tiles.keys,
        window=layer.window,
        chunk=layer.chunk,
    )
