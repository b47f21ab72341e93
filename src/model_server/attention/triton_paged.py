"""Attention by our own Triton kernels: the default on a GPU.

Single queries go to the decode kernel, runs of queries to the prefill kernel; a mixed batch launches both. What they
need to know of the batch is worked out once per step and shared by the layers of the same shape and reach.

A step of single queries takes lengths and blocks from the device alone, and everything about its launches follows from
shapes: it can be captured in a CUDA graph and replayed with other numbers in the same tensors. Rows that fill up such a
graph may have a length of 0, or of 1 in the reserved block.
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
    """Why the kernels cannot serve `layer`, as the end of a sentence that begins with its name; None: they can."""
    latent = layer.num_kv_heads == 1 and layer.value_dim < layer.head_dim
    if latent and layer.head_dim <= MAX_LATENT_DIM and layer.value_dim <= MAX_LATENT_VALUE_DIM:
        return None
    widest = max(layer.head_dim, layer.value_dim)
    if widest > MAX_DIM:
        return f"has heads of {widest} numbers, and the kernels hold {MAX_DIM}"
    return None


class TritonBackend:
    """Runs on GPUs of capability 8.0 and later, and in Triton's interpreter.

    batch_invariant: a row's result has the same bits alone and in any batch. Off, the keys of a decode batch are cut so
    that all processors have about the same work, which depends on the batch; and the tiles of prompts are those that
    were fastest when the first prompt was computed, so that another process may have others.
    prefill: computes the prompts of the layers that it serves; None: our kernel computes all.
    """

    name = "triton"
    tgi_name = "paged"
    block_size = 16
    capturable = True  # see above: decode takes lengths and pages from the device, and its launches follow from shapes
    sees_ahead = True

    def __init__(self, *, batch_invariant: bool = False, prefill: FlashPrefill | None = None) -> None:
        self._batch_invariant = batch_invariant
        # Reads keys and values once for all places of a sequence, which are then cut by the longest, not by their own
        # lengths.
        self.joins_windows = not batch_invariant
        self._prefill = prefill
        self._decode_configs: dict[_Shape, DecodeConfig] = {}
        self._prefill_configs: dict[_Shape, PrefillConfig] = {}

    def begin(self, metadata: AttentionMetadata, cache: KvCache) -> TritonStep:
        """Launches nothing yet."""
        return TritonStep(self, metadata, cache)

    def prompts_of(self, metadata: AttentionMetadata) -> Prompts | None:
        """What the library for prompts is given of a step; None: nothing."""
        return None if self._prefill is None else prompts_of(metadata)

    def library_for(self, layer: AttentionLayer, cache: KvCache) -> FlashPrefill | None:
        """What computes the prompts of this layer instead of our kernel."""
        library = self._prefill
        return library if library is not None and library.serves(layer, cache, _unmeasured()) else None

    def decode_config(self, layer: AttentionLayer, cache: KvCache, places: int = 1) -> DecodeConfig:
        """How single queries of layers of this shape are computed, or `places` of each sequence."""
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
        """How prompts of layers of this shape are computed. The first question, while the model warms up, measures."""
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
    """One forward, see `AttentionStep`. Plans are made when the first layer asks for them."""

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
        """The step's own keys and values are read from the cache, where they are already."""
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
        """What the rows of the step see, as the kernel takes it."""
        last, first = self._metadata.last_keys, self._metadata.first_keys
        return None if last is None or first is None else (last.int(), first.int())

    def _places(self, layer: AttentionLayer) -> int:
        """Queries of a sequence that are computed together. Those of layers with a window may see different first keys;
        a latent head's fill a tile by themselves."""
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
