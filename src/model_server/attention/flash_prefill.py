"""Prompts by flash-attn 4 on Hopper and Blackwell, over the Triton backend's pages; single queries stay with ours.

Optional (extra `flash-attn-4`). A layer's shape is tried against our kernel during the warm-up, and stays with ours if
results differ.

Source: `flash_attn/cute/interface.py` of 4.0.0b36.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache, KvShape

logger = logging.getLogger(__name__)

MODULE = "flash_attn.cute.interface"
# Query lengths of the trials: it has one kernel for queries that fit a tile and one for longer ones.
_TRIALS = ((5, 40), (600,))
_PREFIX = 21
# Of the difference to our kernel, by norms: both round to 16 bits.
_TOLERANCE = 2e-2
# Keys and values of DeepSeek V2 and V3, made from their latents: the only widths that it serves although they differ.
_DEEPSEEK = (192, 128)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The sequences of a step with several queries, in turn; `first` and `last` of their tokens."""

    first: int
    last: int
    block_tables: Tensor
    cu_seqlens_q: Tensor
    kv_lengths: Tensor
    max_query_length: int
    max_kv_length: int


def prompts_of(metadata: AttentionMetadata) -> Prompts | None:
    """Return the prompts of a step; None if there are none, or single queries between them."""
    lengths = metadata.query_lengths_host
    several = [i for i, length in enumerate(lengths) if length > 1]
    if not several or several[-1] - several[0] + 1 != len(several):
        return None
    begin, end = several[0], several[-1] + 1
    first = sum(lengths[:begin])
    starts = metadata.cu_seqlens_q[begin : end + 1]
    return Prompts(
        first,
        first + sum(lengths[begin:end]),
        metadata.block_tables[begin:end],
        starts - first if first else starts,
        metadata.kv_lengths[begin:end],
        max(lengths[begin:end]),
        max(metadata.kv_lengths_host[begin:end]),
    )


class FlashPrefill:
    """Calls `flash_attn_varlen_func` on GPUs of capability `major`, 9 or 10."""

    def __init__(self, function: Callable[..., Any], major: int) -> None:
        self._function = function
        self._major = major
        self._tried: dict[tuple[object, ...], bool] = {}

    def serves(self, layer: AttentionLayer, cache: KvCache, ours: AttentionBackend) -> bool:
        """Whether such layers are served; the first time for a shape, try it against `ours`."""
        shape, dtype = cache.shapes[layer.index], cache.rows[layer.index].dtype
        key = (
            shape,
            dtype,
            layer.num_heads,
            layer.window is None,
            layer.softcap is None,
            layer.sinks is None,
        )
        found = self._tried.get(key)
        if found is None:
            found = self._tried[key] = self._knows(layer, dtype) and self._agrees(layer, shape, cache, ours)
        return found

    def attend(self, layer: AttentionLayer, query: Tensor, keys: Tensor, values: Tensor, prompts: Prompts) -> Tensor:
        """Return [prompt tokens, num_heads, value_dim]; pages as in `paged_prefill`."""
        output: Any = self._function(
            query[prompts.first : prompts.last],
            keys,
            values,
            cu_seqlens_q=prompts.cu_seqlens_q,
            max_seqlen_q=prompts.max_query_length,
            max_seqlen_k=prompts.max_kv_length,
            seqused_k=prompts.kv_lengths,
            page_table=prompts.block_tables,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(None, None) if layer.window is None else (layer.window - 1, 0),
            learnable_sink=layer.sinks,
            softcap=layer.softcap or 0.0,
        )
        attended: Tensor = output[0] if isinstance(output, tuple) else output
        return attended

    def _knows(self, layer: AttentionLayer, cache_dtype: torch.dtype) -> bool:
        dim = layer.head_dim
        if cache_dtype not in (torch.float16, torch.bfloat16) or layer.alibi is not None or layer.chunk is not None:
            return False
        if (dim, layer.value_dim) == _DEEPSEEK:
            return True
        if dim != layer.value_dim or dim % 8:
            return False
        return dim <= 128 or dim == 256 or (self._major == 9 and dim < 256)

    def _agrees(self, layer: AttentionLayer, shape: KvShape, cache: KvCache, ours: AttentionBackend) -> bool:
        try:
            worst = max(self._difference(layer, shape, cache, ours, lengths) for lengths in _TRIALS)
        except Exception as error:  # a library of many parts, each of which may be missing or too new
            reason = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning("flash-attn 4 cannot compute prompts here, our kernel does: %s", reason[0])
            return False
        if not worst < _TOLERANCE:
            logger.warning("flash-attn 4 computes prompts wrongly here (error %.3g), our kernel computes them", worst)
            return False
        logger.info("Prompts of layers with heads of %d are computed by flash-attn 4", layer.head_dim)
        return True

    def _difference(
        self, layer: AttentionLayer, shape: KvShape, cache: KvCache, ours: AttentionBackend, lengths: tuple[int, ...]
    ) -> float:
        """Compare norms of one step of prompts with these lengths."""
        rows = cache.rows[layer.index]
        metadata, num_blocks = _trial_step(lengths, ours.block_size, rows.device)
        trial = KvCache((shape,), num_blocks, ours.block_size, rows.dtype, rows.device)
        trial.rows[0].normal_()
        layer = dataclasses.replace(layer, index=0)
        query = torch.randn(sum(lengths), layer.num_heads, layer.head_dim, dtype=rows.dtype, device=rows.device)
        prompts = prompts_of(metadata)
        assert prompts is not None
        unused = query[:, : layer.num_kv_heads]
        wanted = ours.start(metadata, trial).attend(layer, query, unused, unused).float()
        actual = self.attend(layer, query, trial.keys[0], trial.values[0], prompts).flatten(1).float()
        return float((actual - wanted).norm() / wanted.norm())


def _trial_step(lengths: tuple[int, ...], block_size: int, device: torch.device) -> tuple[AttentionMetadata, int]:
    """Make sequences with cached tokens and `lengths` queries; return the blocks needed, too."""
    totals = [_PREFIX + length for length in lengths]
    counts = [-(-total // block_size) for total in totals]
    bounds = list(accumulate(counts, initial=1))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for i, (begin, end) in enumerate(pairwise(bounds)):
        tables[i, : end - begin] = torch.arange(begin, end)
    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        slots=torch.zeros(sum(lengths), dtype=torch.int64, device=device),
        block_tables=tables.to(device),
        cu_seqlens_q=starts,
        kv_lengths=torch.tensor(totals, dtype=torch.int32, device=device),
        query_lengths_host=lengths,
        kv_lengths_host=tuple(totals),
    )
    return metadata, bounds[-1]


def installed(device: torch.device) -> FlashPrefill | None:
    """Return flash-attn 4 if it is usable on this GPU."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return None
    try:
        importlib.metadata.version("flash-attn-4")
        module: Any = importlib.import_module(MODULE)
        return FlashPrefill(module.flash_attn_varlen_func, torch.cuda.get_device_capability(device)[0])
    except importlib.metadata.PackageNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        logger.warning("flash-attn 4 cannot be loaded, our kernel computes prompts: %s", str(error).splitlines()[0])
        return None
