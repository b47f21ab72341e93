"""Attention by flash-attn 2 (`flash_attn`) or 3 (`flash_attn_interface`, Hopper).

Both read our cache through strides, 16 bytes at once: other head sizes would pad the whole cache, and are refused.
Version 2 needs pages of a multiple of 256 tokens.

Sources: `csrc/flash_attn/flash_api.cpp`, `hopper/flash_api.cpp`, both `flash_attn_interface.py`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.attention.availability import UnavailableError, require_ampere
from model_server.attention.backend import AttentionLayer
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache

# The first with a block table and a soft cap in both functions, and with contiguity asked of the last dimension alone.
OLDEST_VERSION = (2, 7)
LARGEST_HEAD = 256
# Where version 3 may be: newer builds put it into a package.
MODULES_OF_3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")


class FlashAttnBackend:
    """Version 2 or 3, by the module it is given."""

    name = "flash_attn"
    tgi_name = "flashdecoding"
    capturable = True  # decode takes lengths and pages from the device, and its launches follow from shapes
    sees_ahead = False

    def __init__(self, module: ModuleType | Any, version: int) -> None:
        self._module = module
        self._version = version

    @property
    def block_size(self) -> int:
        return 256 if self._version == 2 else 16

    def refuses(self, layer: AttentionLayer) -> str | None:
        """Say, after its name in a sentence, why it cannot serve `layer`."""
        common = refusal(layer)
        if common is not None:
            return common
        if layer.alibi is not None and self._version == 3:
            return "has no ALiBi in version 3"
        if layer.alibi is not None and layer.alibi.bfloat16_scale is not None:
            return "has no ALiBi that rounds to bfloat16 (Falcon)"
        return None

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> FlashAttnStep:
        return FlashAttnStep(self._module, self._version, metadata, cache)


class FlashAttnStep:
    """One forward: lengths are summed once, each layer is one call."""

    def __init__(self, module: ModuleType | Any, version: int, metadata: AttentionMetadata, cache: KvCache) -> None:
        self._module = module
        self._version = version
        self._metadata = metadata
        self._cache = cache
        self._decode = metadata.is_decode
        self._cu_seqlens_k = cumulative(metadata.kv_lengths) if version == 2 and not self._decode else None

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the cache, which has the step's own keys too."""
        pages = self._cache.keys[layer.index], self._cache.values[layer.index]
        options: dict[str, Any] = {
            "softmax_scale": layer.scale,
            "causal": True,
            "window_size": window_size(layer),
            "softcap": 0.0 if layer.softcap is None else layer.softcap,
        }
        if layer.alibi is not None:
            options["alibi_slopes"] = layer.alibi.slopes
        if self._version == 3:
            output = self._attend_3(query, pages, options)
        elif self._decode:
            output = self._module.flash_attn_with_kvcache(
                query.unsqueeze(1),
                *pages,
                cache_seqlens=self._metadata.kv_lengths,
                block_table=self._metadata.block_tables,
                **options,
            )
        else:
            output = self._module.flash_attn_varlen_func(
                query,
                *pages,
                cu_seqlens_q=self._metadata.cu_seqlens_q,
                cu_seqlens_k=self._cu_seqlens_k,
                max_seqlen_q=self._metadata.max_query_length,
                max_seqlen_k=self._metadata.max_kv_length,
                block_table=self._metadata.block_tables,
                **options,
            )
        return output.reshape(query.shape[0], layer.num_heads * layer.value_dim)

    def _attend_3(self, query: Tensor, pages: tuple[Tensor, Tensor], options: dict[str, Any]) -> Tensor:
        """Call the one function of version 3 with a page table."""
        metadata = self._metadata
        if self._decode:
            query = query.unsqueeze(1)
        else:
            options |= {"cu_seqlens_q": metadata.cu_seqlens_q, "max_seqlen_q": metadata.max_query_length}
        output: Any = self._module.flash_attn_with_kvcache(
            query, *pages, cache_seqlens=metadata.kv_lengths, page_table=metadata.block_tables, **options
        )
        # Its betas return the logarithms of the softmax' sums too, asked or not.
        attended: Tensor = output[0] if isinstance(output, tuple) else output
        return attended


def refusal(layer: AttentionLayer) -> str | None:
    """Say what no kernel of this family does, if the layer needs it."""
    if layer.sinks is not None:
        return "has no attention sinks"
    if layer.distance_bias is not None:
        return "has no biases by distance"
    if layer.chunk is not None:
        return "has no attention in chunks"
    if layer.value_dim != layer.head_dim:
        return f"needs keys and values of one width, not {layer.head_dim} and {layer.value_dim}"
    if layer.head_dim > LARGEST_HEAD or layer.head_dim % 8:
        return f"needs a head size that is a multiple of 8 up to {LARGEST_HEAD}, not {layer.head_dim}"
    return None


def window_size(layer: AttentionLayer) -> tuple[int, int]:
    """Return how many keys (before, after) its position a query sees; -1: all."""
    return (-1, -1) if layer.window is None else (layer.window - 1, 0)


def cumulative(lengths: Tensor) -> Tensor:
    """Sum lengths [n] to starts [n + 1], int32."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def available(device: torch.device, dtype: torch.dtype) -> FlashAttnBackend:
    """Return version 3 on Hopper if installed, else version 2."""
    require_ampere(device, dtype)
    if torch.cuda.get_device_capability(device)[0] == 9:
        for name in MODULES_OF_3:
            module = _module(name)
            if module is not None:
                return FlashAttnBackend(module, 3)
    module = _module("flash_attn")
    # The folder is there with flash-attn 4 alone, too: a namespace without functions.
    if module is None or not hasattr(module, "flash_attn_varlen_func"):
        raise UnavailableError("flash-attn is not installed (extra `flash-attn`)")
    version = importlib.metadata.version("flash_attn")
    if _numbers(version) < OLDEST_VERSION:
        raise UnavailableError(f"flash-attn {version} is too old: 2.7 is the first that serves")
    return FlashAttnBackend(module, 2)


def _module(name: str) -> ModuleType | None:
    """Import a module; None if it is not installed.

    Raises:
        UnavailableError: It is installed and cannot be loaded.
    """
    try:
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(f"{name} cannot be loaded: {str(error).splitlines()[0]}") from error


def _numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
