"""The default of `max_batch_prefill_tokens`: about a second of the GPUs' work, within memory. Pure.

Figures and integer arithmetic are TGI's, so that a deployment keeps its default; quantized bytes come from `memory`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from launcher.config import LauncherConfig
from launcher.planning import memory
from launcher.planning.adapters import NO_ADAPTERS, Listed, slot_bytes
from launcher.planning.hardware import Gpu, Hardware
from launcher.planning.model_info import ModelInfo

_BASE = {"qwen2_vl": 10_000, "qwen2_5_vl": 10_000, "gemma3": 8_000}
_DEFAULT = 4096
_LEAST_OPTIMAL = 100
"""Fewer tokens than these cannot be an estimate that is worth following."""

# Dense fp16 operations a second, by GPU, as in TGI's launcher.
_CARD_FLOPS = {
    "nvidia-4090": 82, "nvidia-t4": 65, "nvidia-l4": 121, "nvidia-l40": 181, "nvidia-l40s": 363, "nvidia-a10g": 125,
    "nvidia-a40": 149, "nvidia-a100": 312, "nvidia-a100-sxm4-80gb": 312, "nvidia-a100-sxm4-40gb": 312,
    "nvidia-a100-80gb-pcie": 312, "nvidia-h100": 900, "nvidia-h100-80gb-hbm3": 900, "nvidia-h100-nvl": 900,
    "nvidia-h200": 989,
}  # fmt: skip


class Resolved(NamedTuple):
    """A number that the launcher decided on."""

    value: int
    # Completes "N because of ..." in the log; `notes` are worth a warning each.
    reason: str
    notes: tuple[str, ...] = ()


def prefill_tokens(
    config: LauncherConfig, hardware: Hardware, info: ModelInfo | None, num_shard: int, listed: Listed = NO_ADAPTERS
) -> Resolved:
    """The operator's budget, or TGI's default for this model on these GPUs."""
    if config.max_batch_prefill_tokens is not None:
        return Resolved(config.max_batch_prefill_tokens, "`--max-batch-prefill-tokens`")
    gpu = hardware.gpus[0] if hardware.gpus else None
    tokens, reason, notes = _estimate(info, gpu, num_shard)
    if info and info.max_position_embeddings and info.max_position_embeddings < tokens:
        tokens, reason = info.max_position_embeddings, "the model's positions"
    if info and gpu:
        cap, more = _memory_cap(config, info, gpu, num_shard, listed)
        notes += more
        if cap is not None and cap < tokens:
            notes += (f"prefill budget lowered from {tokens} to {cap} tokens, which is what fits in memory",)
            tokens, reason = cap, "the memory of the GPUs"
    # Ours: a default must not contradict what the operator set.
    if config.max_batch_total_tokens is not None and config.max_batch_total_tokens < tokens:
        tokens, reason = config.max_batch_total_tokens, "`--max-batch-total-tokens`"
    asked = memory.estimate(config, hardware, info, num_shard, listed) if config.kv_cache_memory is not None else None
    if asked is not None and asked.tokens is not None and asked.tokens < tokens:
        tokens, reason = max(1, asked.tokens), "`--kv-cache-memory`"
    return Resolved(tokens, reason, notes)


def _estimate(info: ModelInfo | None, gpu: Gpu | None, num_shard: int) -> tuple[int, str, tuple[str, ...]]:
    """Return tokens, reason and warnings, by the speed of a known GPU and the model's size."""
    kind = info.model_type if info else None
    base = _BASE.get(kind or "", _DEFAULT)
    reason = f"TGI's default for {kind}" if kind in _BASE else "TGI's default"
    if info is None or gpu is None:
        return base, reason, ()
    flops, per_token = _CARD_FLOPS.get(gpu.card), _model_flops(info)
    if flops is None:
        return base, reason, (f"no figures for the GPU {gpu.card!r}: default prefill budget",)
    if per_token and (optimal := flops * 10**12 * num_shard // per_token) > _LEAST_OPTIMAL:
        return optimal, f"what {num_shard} x {gpu.card} compute in a second", ()
    return base, reason, ()


def _memory_cap(
    config: LauncherConfig, info: ModelInfo, gpu: Gpu, num_shard: int, listed: Listed
) -> tuple[int | None, tuple[str, ...]]:
    """How many tokens' activations fit beside the weights, if that is known; and what to warn about."""
    sizes = _memory_use(config, info, gpu)
    if not gpu.memory_mib or sizes is None:
        return None, ()
    available = _f32(float((gpu.memory_mib << 20) * num_shard))
    available = _f32(_f32(available * _f32(config.cuda_memory_fraction)) * _f32(config.tgi_wiggle_room))
    model_bytes, token_bytes = sizes
    slots = num_shard * slot_bytes(config, info, num_shard // config.num_stage, 2, listed) // config.num_stage
    if model_bytes + slots > available:
        what = f"the model with {slots >> 20} MiB of slots for adapters" if slots else "the model"
        return None, (f"{what} seems to be larger than the memory of the GPUs",)
    model_bytes += slots
    return max(1, (int(available) - model_bytes) // token_bytes), ()


def _model_flops(info: ModelInfo) -> int | None:
    """Operations of one token in the linear layers."""
    hidden, inner, heads = info.hidden_size, info.intermediate_size, info.num_heads
    kv_heads, width, layers = info.num_kv_heads, info.head_dim, info.num_layers
    if info.has_vision or not (hidden and inner and heads and kv_heads and width and layers):
        return None
    attention = 2 * hidden * (3 * heads * width + 2 * kv_heads * width)
    return layers * (attention + 6 * hidden * inner * (info.experts_per_token + info.num_shared_experts))


def _memory_use(config: LauncherConfig, info: ModelInfo, gpu: Gpu) -> tuple[int, int] | None:
    """Return the bytes of the weights, and of one token in a prefill."""
    hidden, inner, heads, vocab = info.hidden_size, info.intermediate_size, info.num_heads, info.vocab_size
    kv_heads, width, layers, experts = info.num_kv_heads, info.head_dim, info.num_layers, info.num_experts
    if not (hidden and inner and heads and kv_heads and width and layers and vocab):
        return None
    attention = (heads + 2 * kv_heads) * width + heads * width * hidden
    model = 2 * (layers * (attention + 3 * inner * experts * hidden) + 2 * hidden * vocab)
    if info.quantization is not None or config.quantize is not None:
        stored = memory.weight_bytes(info, config.quantize, 2, on_gpu=True)
        if stored is None:
            return None
        model = stored
    cache_itemsize = 2 if memory.cache_dtype(config, info, gpu) is None else 1
    return model, 2 * cache_itemsize * kv_heads * width * layers + 6 * (inner + inner // 2) * experts


def _f32(value: float) -> float:
    """TGI computes the memory cap in single precision; so do we, for equal defaults."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
