"""Attention by our Triton kernels, the default on a GPU: one kernel for single queries, one for runs of queries.

Plans are made once a step for layers of the same shape and reach. A step of single queries reads lengths and blocks on
the device alone, so that a CUDA graph can replay it; its padding rows have length 0, or 1 in the reserved block.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.attention.flash_prefill import FlashPrefill, Prompts, prompts_of
from model_server.attention.metadata import AttentionMetadata
from model_server.kernels.attention.decode import paged_decode
from model_server.kernels.attention.decode_config import DecodeConfig, decode_config, plan_rows
from model_server.kernels.attention.decode_plan import DecodePlan
from model_server.kernels.attention.prefill import PrefillConfig, paged_prefill, prefill_config, tile_list
from model_server.kernels.attention.prefill_choice import fastest_config
from model_server.memory.kv_cache import KvCache

# What a program can hold of a head, in registers and shared memory.
MAX_DIM = 256
MAX_LATENT_DIM, MAX_LATENT_VALUE_DIM = 640, 512

_Shape = tuple[int, int, int, int, bool, torch.dtype, torch.device, int]


def refuses(layer: AttentionLayer) -> str | None:
    """Say, after the backend's name in a sentence, why the kernels cannot serve `layer`."""
    if layer.distance_bias is not None:
        return "has no biases by distance"
    latent = layer.num_kv_heads == 1 and layer.value_dim < layer.head_dim
    if latent and layer.head_dim <= MAX_LATENT_DIM and layer.value_dim <= MAX_LATENT_VALUE_DIM:
        return None
    widest = max(layer.head_dim, layer.value_dim)
    if widest > MAX_DIM:
        return f"has heads of {widest} numbers, and the kernels hold {MAX_DIM}"
    return None


class TritonBackend:
    """Runs on GPUs of capability 8.0 and in Triton's interpreter."""

    name = "triton"
    tgi_name = "paged"
    block_size = 16
    capturable = True  # see above: decode takes lengths and pages from the device, and its launches follow from shapes
    sees_ahead = True

    def __init__(self, *, batch_invariant: bool = False, prefill: FlashPrefill | None = None) -> None:
        """Choose how rows are computed.

        Args:
            batch_invariant: A row has the same bits alone and in any batch. Off, the keys of a decode batch are cut to
                balance the processors, and prompts use the tiles that were fastest when first measured.
            prefill: Computes the prompts of layers that it serves; None: our kernel does.
        """
        self._batch_invariant = batch_invariant
        # Reads keys and values once for all places of a sequence, which are then cut by the longest, not by their own
        # lengths.
        self.joins_windows = not batch_invariant
        self._prefill = prefill
        self._decode_configs: dict[_Shape, DecodeConfig] = {}
        self._prefill_configs: dict[_Shape, PrefillConfig] = {}

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> TritonStep:
        """Launches nothing yet."""
        return TritonStep(self, metadata, cache)

    def prompts_of(self, metadata: AttentionMetadata) -> Prompts | None:
        """Return what the prompts' library gets of a step, if anything."""
        return None if self._prefill is None else prompts_of(metadata)

    def library_for(self, layer: AttentionLayer, cache: KvCache) -> FlashPrefill | None:
        """Return what computes this layer's prompts instead of our kernel."""
        library = self._prefill
        return library if library is not None and library.serves(layer, cache, _unmeasured()) else None

    def decode_config(self, layer: AttentionLayer, cache: KvCache, places: int = 1) -> DecodeConfig:
        """Return how single queries, or `places` of each sequence, are computed."""
        key = _shape(layer, cache, places)
        found = self._decode_configs.get(key)
        if found is None:
            found = self._decode_configs[key] = decode_config(
                layer,
                value_in_key=cache.shapes[layer.index].value_in_key,
                cache_dtype=cache.rows[layer.index].dtype,
                device=cache.rows[layer.index].device,
                batch_invariant=self._batch_invariant,
                places=places,
            )
        return found

    def prefill_config(self, layer: AttentionLayer, cache: KvCache) -> PrefillConfig:
        """Return how prompts are computed, measured at the first call in the warm-up."""
        key = _shape(layer, cache)
        found = self._prefill_configs.get(key)
        if found is None:
            rows, value_in_key = cache.rows[layer.index], cache.shapes[layer.index].value_in_key
            if self._batch_invariant:
                found = prefill_config(layer, value_in_key=value_in_key, cache_dtype=rows.dtype, device=rows.device)
            else:
                found = fastest_config(
                    layer,
                    value_in_key=value_in_key,
                    page=cache.block_size,
                    cache_dtype=rows.dtype,
                    device=rows.device,
                )
            self._prefill_configs[key] = found
        return found


def _shape(layer: AttentionLayer, cache: KvCache, places: int = 1) -> _Shape:
    rows = cache.rows[layer.index]
    value_in_key = cache.shapes[layer.index].value_in_key
    heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim)
    return (*heads, value_in_key, rows.dtype, rows.device, places)


def _unmeasured() -> TritonBackend:
    """For the trials of a library."""
    return TritonBackend(batch_invariant=True)


class TritonStep:
    """One forward; plans are made when first needed."""

    def __init__(self, backend: TritonBackend, metadata: AttentionMetadata, cache: KvCache) -> None:
        self._backend = backend
        self._metadata = metadata
        self._cache = cache
        lengths = metadata.query_lengths_host
        self._num_single = len(lengths) if metadata.is_decode else lengths.count(1)
        sees_ahead = metadata.last_keys is not None  # which no library's kernel knows
        self._prompts = None if metadata.is_decode or sees_ahead else backend.prompts_of(metadata)
        self._plans: dict[tuple[DecodeConfig, int, int | None, int | None], DecodePlan] = {}
        self._tiles: dict[tuple[int, int, int | None, int | None], Tensor] = {}

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the cache, which has the step's own keys too."""
        metadata, cache = self._metadata, self._cache
        keys, values = cache.keys[layer.index], cache.values[layer.index]
        tables = metadata.block_tables
        if query.stride(-1) != 1:
            query = query.contiguous()
        out = query.new_empty(query.shape[0], layer.num_heads * layer.value_dim)
        if self._num_single:
            decode = self._backend.decode_config(layer, cache, self._places(layer))
            plan = self._plan(layer, decode)
            lengths = metadata.kv_lengths if decode.places > 1 else None
            paged_decode(query, keys, values, tables, plan, layer, decode, out=out, kv_lengths=lengths)
        if self._num_single < len(metadata.query_lengths_host):
            library = None if self._prompts is None else self._backend.library_for(layer, cache)
            if library is not None and self._prompts is not None:
                attended = library.attend(layer, query, keys, values, self._prompts).flatten(1)
                if not self._num_single:
                    return attended
                out[self._prompts.first : self._prompts.last] = attended
                return out
            prefill = self._backend.prefill_config(layer, cache)
            tiles = self._tile_list(layer, prefill)
            paged_prefill(query, keys, values, tables, tiles, layer, prefill, out=out, reach=self._reach)
        return out

    @cached_property
    def _reach(self) -> tuple[Tensor, Tensor] | None:
        """Return what the step's rows see, as the kernel takes it."""
        last, first = self._metadata.last_keys, self._metadata.first_keys
        if last is None:
            return None
        last = last.int()
        return last, torch.full_like(last, -1) if first is None else first.int()

    def _places(self, layer: AttentionLayer) -> int:
        """Count queries of a sequence computed together: one where first keys may differ, or a latent head's fill a
        tile.
        """
        if (
            not self._metadata.is_decode
            or not self._backend.joins_windows
            or self._cache.shapes[layer.index].value_in_key
        ):
            return 1
        return self._metadata.places if layer.window is None and layer.chunk is None else 1

    def _plan(self, layer: AttentionLayer, config: DecodeConfig) -> DecodePlan:
        key = (config, layer.num_kv_heads, layer.window, layer.chunk)
        found = self._plans.get(key)
        if found is None:
            metadata = self._metadata
            found = plan_rows(config, layer, metadata.kv_lengths, metadata.cu_seqlens_q, self._num_single)
            self._plans[key] = found
        return found

    def _tile_list(self, layer: AttentionLayer, config: PrefillConfig) -> Tensor:
        group = layer.num_heads // layer.num_kv_heads
        key = (group, config.tiles.rows, layer.window, layer.chunk)
        found = self._tiles.get(key)
        if found is None:
            metadata = self._metadata
            tiles = tile_list(
                metadata.query_lengths_host,
                metadata.kv_lengths_host,
                group,
                config.tiles.rows,
                window=layer.window,
                chunk=layer.chunk,
                skip_single=True,
            )
            if metadata.slots.is_cuda:
                tiles = tiles.pin_memory().to(metadata.slots.device, non_blocking=True)
            found = self._tiles[key] = tiles
        return found
