"""How much memory the KV cache may take, and the blocks that follow."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from model_server.config import ServeConfig
from model_server.engine.engine import Engine
from model_server.errors import StartupError
from model_server.memory.budget import CudaMemory, DeviceMemory, Measured, cache_blocks
from wire.host import kv_memory
from wire.host.machine import free_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The user's bounds on memory, and what is known before the warm-up; `dtype` of the KV cache."""

    dtype: torch.dtype
    max_batch_total_tokens: int | None
    cuda_memory_fraction: float
    model_max_length: int | None
    memory: DeviceMemory | None  # None: it is not measured (CPU)
    weight_bytes: int | None = None  # None: not known
    cache_bytes: int | None = None  # None: the user has not said it
    default_cache_bytes: int | None = None  # on a CPU, where the user has said nothing of the cache
    state_bytes: int = 0  # of states that layers keep, allocated beside the cache


def plan_memory(
    config: ServeConfig, engine: Engine, cache_dtype: torch.dtype, local_size: int, state_bytes: int
) -> MemoryPlan:
    """Plan memory just after loading, when a GPU holds only weights.

    Args:
        local_size: Shards that share this machine's memory.
        state_bytes: Of states that layers keep, allocated beside the cache.
    """
    device, weights = engine.options.device, engine.runner.traits.weight_bytes
    if is_cuda := device.type == "cuda":
        weights = torch.cuda.memory_allocated(device) - state_bytes
    default = config.default_kv_cache_memory
    if default is None:
        # The states' pages are not taken yet on a CPU.
        default = kv_memory.default_bytes((free_memory() or 0) - state_bytes * local_size) // local_size
    return MemoryPlan(
        dtype=cache_dtype, max_batch_total_tokens=config.max_batch_total_tokens, cache_bytes=config.kv_cache_memory,
        default_cache_bytes=default, cuda_memory_fraction=config.cuda_memory_fraction,
        model_max_length=engine.tokenizer.model_max_length, memory=CudaMemory(device) if is_cuda else None,
        weight_bytes=weights, state_bytes=state_bytes,
    )  # fmt: skip


def measured_blocks(engine: Engine, plan: MemoryPlan, measured: Measured) -> int:
    """Return the blocks that a GPU's memory holds beside what the warm-up measured, within the user's bounds."""
    num_bytes, fraction = block_bytes(engine, plan.dtype), plan.cuda_memory_fraction
    if not num_bytes:
        tokens = kv_memory.UNCACHED_TOKENS
        return min(tokens, plan.max_batch_total_tokens or tokens) // engine.options.block_size
    num_blocks = cache_blocks(measured, fraction, num_bytes)
    text = "Of %.0f MiB for the KV cache at a memory fraction of %g, %.0f are used"
    logger.info(text, measured.budget(fraction) / 2**20, fraction, num_blocks * num_bytes / 2**20)
    if plan.max_batch_total_tokens is not None:
        num_blocks = min(num_blocks, plan.max_batch_total_tokens // engine.options.block_size)
    if plan.cache_bytes is not None:
        num_blocks = min(num_blocks, plan.cache_bytes // num_bytes)
    return num_blocks


def cpu_blocks(engine: Engine, plan: MemoryPlan, longest: int) -> int:
    """Return the blocks of a CPU's cache.

    Args:
        longest: Tokens that a default must hold.

    Raises:
        StartupError: The user's memory holds no cache.
    """
    block_size, bound = engine.options.block_size, plan.max_batch_total_tokens
    token_bytes = -(-block_bytes(engine, plan.dtype) // block_size)
    if plan.cache_bytes is not None:
        tokens = kv_memory.tokens_in(plan.cache_bytes, token_bytes)
        if tokens < 2 * block_size:
            asked = f"--kv-cache-memory of {plan.cache_bytes} bytes for each shard"
            raise StartupError(f"{asked} leaves no KV cache, of which a token takes {token_bytes}; give more")
        return (tokens if bound is None else min(tokens, bound)) // block_size
    if bound is not None:
        return bound // block_size
    return kv_memory.default_tokens(plan.default_cache_bytes or 0, token_bytes, longest) // block_size


def block_bytes(engine: Engine, dtype: torch.dtype) -> int:
    """Return what a block of the cache takes."""
    if engine.runner.traits.state_bytes is not None:
        return engine.runner.traits.state_bytes
    return sum(shape.block_bytes(engine.options.block_size, dtype) for shape in engine.runner.kv_shapes)
