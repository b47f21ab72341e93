"""Chooses the fastest prefill tiles for a shape of layer, measured once on this GPU.

Without a measurement it is the first candidate, with the most keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from model_server.attention.backend import AttentionLayer
from model_server.kernels.attention.parts import Tiles, shared_memory, widths_of
from model_server.kernels.attention.prefill import PrefillConfig, paged_prefill, prefill_tiles, tile_list
from model_server.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

# Tokens of the prompt that is timed: all processors have several tiles, and most keys need no mask.
_TOKENS = 2048
# Another candidate must be this much faster: less is within the noise of a measurement.
_GAIN = 0.97

# Milliseconds that a call takes.
Timer = Callable[[Callable[[], object]], float]


def fastest_config(
    layer: AttentionLayer, *, value_in_key: bool, page: int, cache_dtype: torch.dtype, device: torch.device
) -> PrefillConfig:
    """Return the fastest config, measured on a GPU that it waits for."""
    widths = widths_of(layer, value_in_key)
    configs = [PrefillConfig(widths, t) for t in prefill_tiles(widths, cache_dtype.itemsize, shared_memory(device))]
    if len(configs) == 1 or device.type != "cuda":
        return configs[0]
    try:
        chosen, times = measured(configs, layer, page, cache_dtype, device, Stopwatch(device, cold=False))
    except torch.OutOfMemoryError:
        logger.warning("Too little memory to measure the tiles of prompts: the first candidate is used")
        return configs[0]
    named = ", ".join(f"{_name(config.tiles)} {time:.3f} ms" for config, time in zip(configs, times, strict=True))
    logger.info("Prompts of layers with heads of %d use tiles of %s: %s", layer.head_dim, _name(chosen.tiles), named)
    return chosen


def measured(
    configs: list[PrefillConfig],
    layer: AttentionLayer,
    page: int,
    cache_dtype: torch.dtype,
    device: torch.device,
    timer: Timer,
    num_tokens: int = _TOKENS,
) -> tuple[PrefillConfig, list[float]]:
    """Measure each config for one prompt of 16-bit queries; return the fastest, and all times."""
    blocks = -(-num_tokens // page)
    query = torch.randn(num_tokens, layer.num_heads, layer.head_dim, dtype=cache_dtype, device=device)
    keys, values = (
        torch.randn(blocks, page, layer.num_kv_heads, dim, dtype=cache_dtype, device=device)
        for dim in (layer.head_dim, layer.value_dim)
    )
    tables = torch.arange(blocks, dtype=torch.int32, device=device).view(1, -1)
    out = query.new_empty(num_tokens, layer.num_heads * layer.value_dim)
    times = []
    for config in configs:
        tiles = tile_list(
            (num_tokens,),
            (num_tokens,),
            layer.num_heads // layer.num_kv_heads,
            config.tiles.rows,
            window=layer.window,
            chunk=layer.chunk,
        ).to(device)
        times.append(timer(partial(paged_prefill, query, keys, values, tables, tiles, layer, config, out=out)))
    weighted = [times[0] * _GAIN, *times[1:]]
    return configs[min(range(len(configs)), key=weighted.__getitem__)], times


def _name(tiles: Tiles) -> str:
    return f"{tiles.rows} x {tiles.keys}"
