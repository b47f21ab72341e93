"""Warm-up: how many KV blocks there will be, and the limits that follow.

On a GPU the largest allowed prefill is run and what it leaves free becomes cache; on a CPU the cache is a share that
the user names, never "most of the RAM" (the machine is not ours alone).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from dataclasses import dataclass

import torch

from model_server.batch.sequence import NewRequest, number_blocks
from model_server.distributed import ProcessGroup
from model_server.engine import Engine
from model_server.errors import OutOfMemoryError, StartupError
from model_server.kv_cache import KvCache
from model_server.runner import KeepsState

logger = logging.getLogger(__name__)

# CPU capacity in tokens when the user names none (scheduler.md 6.7).
DEFAULT_CPU_TOKENS = 16_000
# A CPU warm-up measures no memory; it only has to touch every code path once.
CPU_WARMUP_TOKENS = 64
# TGI's head-room for what the allocator cannot use (TGI_WIGGLE_ROOM in its shard is 0.90).
HEADROOM = 0.95


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer to Warmup: tokens the cache holds (block 0 included) and the resolved limits."""

    total_tokens: int
    max_input_tokens: int
    max_total_tokens: int


@dataclass(frozen=True, kw_only=True)
class WarmupRequest:
    """What the router wants to know. None: unset by the user."""

    requests: list[NewRequest]
    max_input_tokens: int | None
    max_prefill_tokens: int
    max_total_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The user's bounds on memory."""

    dtype: torch.dtype
    max_batch_total_tokens: int | None
    cuda_memory_fraction: float
    model_max_length: int | None


def warm_up(engine: Engine, group: ProcessGroup, plan: MemoryPlan, asked: WarmupRequest) -> Capacity:
    """Run a prefill and a decode step, size the cache, allocate it.

    All ranks call this together and agree on the smallest result.

    Raises StartupError when the prefill does not fit, a row of it fails on any rank, or no block is left.
    """
    started = time.perf_counter()
    engine.max_prefill_tokens = asked.max_prefill_tokens
    block_size = engine.options.block_size
    on_cuda = engine.options.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(engine.options.device)
    used_blocks, failure = _try_step(engine, plan, asked.requests, None if on_cuda else CPU_WARMUP_TOKENS)
    if not group.all_reduce_min(0 if failure else 1):  # only the rank that answers for a row knows of its failure
        raise StartupError(f"the warm-up failed: {failure or 'another rank says why'}")
    if on_cuda:
        num_blocks = used_blocks + _free_blocks(engine, plan)
        if plan.max_batch_total_tokens is not None:
            num_blocks = min(num_blocks, plan.max_batch_total_tokens // block_size)
    else:
        num_blocks = _cpu_blocks(engine, plan, asked)
    num_blocks = group.all_reduce_min(num_blocks)
    if num_blocks < 2:
        raise StartupError(
            "no memory is left for the KV cache; lower --max-batch-prefill-tokens or raise --cuda-memory-fraction"
        )
    engine.set_cache(None)
    cache = KvCache(engine.runner.kv_shapes, num_blocks, block_size, plan.dtype, engine.options.device)
    engine.set_cache(cache)
    capacity = _limits(engine, plan, asked, num_blocks)
    logger.info(
        "%s: %d blocks of %d tokens, %.1f MiB; warm-up took %.2f s",
        "Room for the states of requests" if engine.keeps_state else "KV cache",
        num_blocks,
        block_size,
        num_blocks * _block_bytes(engine, plan) / 2**20,
        time.perf_counter() - started,
    )
    return capacity


def _try_step(
    engine: Engine, plan: MemoryPlan, requests: list[NewRequest], max_tokens: int | None
) -> tuple[int, str | None]:
    """One prefill and one decode of the router's warm-up batch (cut to `max_tokens`).

    Returns the blocks that it took, and the error of the first row that failed.
    """
    prompts, kept = [], []
    budget = max_tokens
    for request, prompt in zip(requests, engine.encode(requests), strict=True):
        if budget is not None:
            if budget <= 0:
                break
            prompt = prompt[:budget]
            budget -= len(prompt)
        prompts.append(prompt)
        kept.append(request)
    tokens = [len(p) + r.stopping.max_new_tokens for p, r in zip(prompts, kept, strict=True)]
    places = number_blocks(tokens, engine.options.block_size)
    kept = [dataclasses.replace(r, blocks=b, slots=s) for r, (b, s) in zip(kept, places, strict=True)]
    used_blocks = sum(len(blocks) for blocks, _ in places)
    engine.set_cache(
        KvCache(engine.runner.kv_shapes, used_blocks, engine.options.block_size, plan.dtype, engine.options.device)
    )
    try:
        result = engine.launch_prefill(0, kept, prompts)()
        generations = result.generations
        if result.batch is not None:
            generations = generations + engine.launch_decode([0], numbered=True)().generations
    except OutOfMemoryError as error:
        raise StartupError(
            f"Not enough memory to handle {sum(len(p) for p in prompts)} prefill tokens. "
            "You need to decrease `--max-batch-prefill-tokens`"
        ) from error
    return used_blocks, next((g.error for g in generations if g.error is not None), None)


def _block_bytes(engine: Engine, plan: MemoryPlan) -> int:
    runner = engine.runner
    if isinstance(runner, KeepsState):
        return runner.state_bytes
    return engine.options.block_size * sum(s.bytes_per_token(plan.dtype) for s in runner.kv_shapes)


def _free_blocks(engine: Engine, plan: MemoryPlan) -> int:
    device = engine.options.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Freed blocks of the step's own activations were handed back by empty_cache, so keep what its peak needed.
    peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    usable = free - peak - (1 - plan.cuda_memory_fraction * HEADROOM) * total
    return max(0, math.floor(usable / _block_bytes(engine, plan)))


def _cpu_blocks(engine: Engine, plan: MemoryPlan, asked: WarmupRequest) -> int:
    block_size = engine.options.block_size
    if plan.max_batch_total_tokens is not None:
        return plan.max_batch_total_tokens // block_size
    # One block more than the longest request needs: block 0 is reserved.
    longest = max(asked.max_total_tokens or 0, asked.max_prefill_tokens) + block_size
    return math.ceil(max(DEFAULT_CPU_TOKENS, longest) / block_size)


def _limits(engine: Engine, plan: MemoryPlan, asked: WarmupRequest, num_blocks: int) -> Capacity:
    """Echo what the user set; otherwise what cache, model and (without chunking) one prefill allow."""
    total_tokens = num_blocks * engine.options.block_size
    max_total = asked.max_total_tokens
    if max_total is None:
        bounds = [total_tokens, plan.model_max_length, engine.runner.max_positions]
        if not engine.options.chunking:
            bounds.append(asked.max_prefill_tokens)
        max_total = min(b for b in bounds if b)
    max_input = asked.max_input_tokens if asked.max_input_tokens is not None else max(max_total - 1, 1)
    return Capacity(total_tokens, max_input, max_total)
