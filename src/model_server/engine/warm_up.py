"""Warm-up: the number of KV blocks, and the limits that follow.

On a GPU the cache is what the largest prefill leaves free; on a CPU what the user says, or a share of free memory.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import traceback
from dataclasses import dataclass

import torch

from model_server.batch.sequence import NewRequest, number_blocks
from model_server.distributed.group import ProcessGroup
from model_server.engine.calls import DecodeCall, PrefillCall, Session
from model_server.engine.engine import Engine
from model_server.engine.memory_plan import MemoryPlan, block_bytes, cpu_blocks, measured_blocks
from model_server.errors import StartupError, WarmUpMemoryError
from model_server.memory.budget import DeviceMemory, Measured, is_out_of_memory
from model_server.memory.kv_cache import KvCache
from model_server.memory.report import MemoryUse
from model_server.runner.cuda_graphs import GraphCost, GraphedRunner
from model_server.runner.runner import CacheHolder
from wire.host import kv_memory
from wire.host.machine import free_memory, total_memory
from wire.warm_up import NOT_ENOUGH_MEMORY

logger = logging.getLogger(__name__)

# A CPU warm-up measures no memory; it only has to touch every code path once.
CPU_WARMUP_TOKENS = 64
# Rows that are sampled at once while memory is measured: as many as the largest default CUDA graph has.
MOST_SAMPLED_ROWS = 256
# Where memory turns out to be short after all, this share of it is tried, this many times.
SMALLER, ATTEMPTS = 0.95, 5
# Seconds that a rank whose memory is short waits for the others to say the same, before it gives them up.
SHORT_LIMIT_S = 30.0
# Sequences while graphs are measured and no limit is known; only tables of a few megabytes depend on it.
UNKNOWN_LENGTH = 32_768


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer to Warmup: tokens of the cache (with block 0), and limits."""

    total_tokens: int
    max_input_tokens: int
    max_total_tokens: int


@dataclass(frozen=True, kw_only=True)
class WarmupRequest:
    """What the router asks; None: unset."""

    session: Session
    requests: list[NewRequest]
    max_input_tokens: int | None
    max_total_tokens: int | None

    @property
    def max_prefill_tokens(self) -> int:
        return self.session.max_prefill_tokens

    @property
    def longest_step(self) -> int:
        """Return the most tokens of one sequence or one prefill."""
        return max(self.max_total_tokens or 0, self.max_prefill_tokens)


def warm_up(engine: Engine, world: ProcessGroup, plan: MemoryPlan, request: WarmupRequest) -> Capacity:
    """Run a prefill and a decode step, size and allocate the cache, and capture graphs; all ranks together.

    Raises:
        WarmUpMemoryError: The prefill does not fit, or leaves no block.
        StartupError: A row fails on a rank.
        FatalError: Memory is short on some ranks only: the others wait in a collective.
    """
    started = time.perf_counter()
    _check_limits(engine, request.max_total_tokens, plan.max_batch_total_tokens)
    engine.start(request.session)
    # A step may be limited to less than a prompt, and the longest prompt may be given by the longest sequence.
    longest = max(request.max_input_tokens or request.max_total_tokens or 0, request.max_prefill_tokens)
    feature_bytes = sum([feature.start(longest) for feature in engine.steps.features])
    block_size = engine.options.block_size
    graphs = engine.runner if isinstance(engine.runner, GraphedRunner) else None
    if graphs is not None:
        graphs.release()
    _drop_cache(engine)
    max_tokens = CPU_WARMUP_TOKENS if plan.memory is None else None
    failure = _agreed_step(engine, world, plan, request, max_tokens)
    if not world.all_reduce_min(0 if failure else 1):  # only the rank that answers for a row knows of its failure
        raise StartupError(f"the warm-up failed: {failure or 'see the log of another rank'}")
    measured = None
    if plan.memory is not None:
        measured = _measure(engine, world, plan, plan.memory, graphs, request, feature_bytes)
        num_blocks = measured_blocks(engine, plan, measured)
    else:
        _drop_cache(engine)
        num_blocks = cpu_blocks(engine, plan, request.longest_step)
    cache = _allocate(engine, world, plan, num_blocks, request)
    engine.set_cache(cache)
    capacity = _limits(engine, plan, request, cache.num_blocks)
    engine.runner.set_longest(capacity.max_total_tokens)
    logger.info(
        "%s: %d blocks of %d tokens, %.1f MiB; warm-up took %.2f s",
        "Room for the states of requests" if engine.keeps_state else f"KV cache in {_name(plan.dtype)}",
        cache.num_blocks,
        block_size,
        cache.num_blocks * block_bytes(engine, plan.dtype) / 2**20,
        time.perf_counter() - started,
    )
    if graphs is not None:
        graphs.capture(cache, capacity.max_total_tokens, world)
    if engine.steps.watcher is not None:
        engine.steps.watcher.measure(engine.runner, cache, world, capacity.max_total_tokens)  # replays, if it can
    _report_memory(engine, world, plan, request, measured, cache)
    return capacity


def _drop_cache(engine: Engine) -> None:
    """Drop the cache, which graphs may still refer to."""
    engine.set_cache(None)
    runner = engine.runner.inner if isinstance(engine.runner, GraphedRunner) else engine.runner
    if isinstance(runner, CacheHolder):
        runner.forget_cache()


def _agreed_step(
    engine: Engine, world: ProcessGroup, plan: MemoryPlan, request: WarmupRequest, max_tokens: int | None
) -> str | None:
    """Try a step; ranks agree on whether memory is short."""
    short: BaseException | None = None
    failure = None
    try:
        failure = _try_step(engine, plan, request.requests, max_tokens)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        short = error
    if not world.any_of(short is not None, SHORT_LIMIT_S if short is not None else None):
        return failure
    if short is not None:
        traceback.clear_frames(short.__traceback__)  # they hold what the step had allocated
    _drop_cache(engine)
    use = _left(plan)
    tokens = request.max_prefill_tokens
    text = "A warm-up with %d prompt tokens ran out of memory: %s\nMemory in MiB\n%s"
    logger.warning(text, tokens, short, use.table())
    raise WarmUpMemoryError(
        f"{NOT_ENOUGH_MEMORY} {tokens} prefill tokens. You need to decrease `--max-batch-prefill-tokens`"
        f"{_or_total_tokens(request)}{_or_remedies(engine)} ({use.line()})"
    ) from short


def _or_total_tokens(request: WarmupRequest) -> str:
    """Name what may be lowered where sequences exceed a step's prompts."""
    longest = request.max_total_tokens
    return "" if longest is None or longest <= request.max_prefill_tokens else f", or `--max-total-tokens` ({longest})"


def _or_remedies(engine: Engine) -> str:
    """Name what may be lowered for features."""
    return "".join([f", or {feature.remedy}" for feature in engine.steps.features if feature.remedy])


def _left(plan: MemoryPlan) -> MemoryUse:
    """Return the memory without a cache."""
    free, total = (free_memory(), total_memory()) if plan.memory is None else plan.memory.rest()
    return MemoryUse(weights=plan.weight_bytes, free=free, total=total)


def _report_memory(
    engine: Engine,
    world: ProcessGroup,
    plan: MemoryPlan,
    request: WarmupRequest,
    measured: Measured | None,
    cache: KvCache,
) -> None:
    """Log what goes where, at INFO on the first rank."""
    taken = cache.num_blocks * block_bytes(engine, plan.dtype)
    if measured is None:
        use = MemoryUse(weights=plan.weight_bytes, cache=taken, free=free_memory(), total=total_memory())
    else:
        use = MemoryUse(
            weights=plan.weight_bytes,
            activations=measured.peak,
            cache=taken,
            graphs=measured.graphs,
            free=measured.free - taken - measured.peak - measured.graphs,
            total=measured.total,
        )
    logger.log(
        logging.INFO if world.rank == 0 else logging.DEBUG,
        "Memory in MiB\n%s",
        dataclasses.replace(use, states=plan.state_bytes or None).table(
            f"{cache.num_blocks} blocks of {engine.options.block_size} tokens",
            f"the largest step, {request.max_prefill_tokens} tokens of prompts",
        ),
    )


def _measure(
    engine: Engine,
    world: ProcessGroup,
    plan: MemoryPlan,
    memory: DeviceMemory,
    graphs: GraphedRunner | None,
    request: WarmupRequest,
    feature_bytes: int,
) -> Measured:
    """Measure the device's memory after the step, without a cache."""
    peak = memory.peak() + feature_bytes
    cost = GraphCost(0, 0)
    lengths = (engine.runner.max_positions, plan.model_max_length, UNKNOWN_LENGTH)
    longest = request.max_total_tokens or min(length for length in lengths if length)
    if engine.steps.watcher is not None:
        peak += engine.steps.watcher.bytes_beside(longest)
    if graphs is not None:
        cost = graphs.measure(engine.cache, longest, world)
    _drop_cache(engine)
    free, total = memory.rest()
    graph_bytes = 0 if graphs is None else cost.total(graphs.num_graphs)
    return Measured(total=total, free=free, peak=peak, graphs=graph_bytes)


def _allocate(
    engine: Engine, world: ProcessGroup, plan: MemoryPlan, num_blocks: int, request: WarmupRequest
) -> KvCache:
    """Allocate the cache of the agreed size, or smaller if memory was lost meanwhile."""
    num_blocks = world.all_reduce_min(num_blocks)
    fits = plan.memory is not None or num_blocks * block_bytes(engine, plan.dtype) <= (total_memory() or math.inf)
    # A CPU's memory is given out before it is there: what is too much for it would end the process later.
    for _ in range(ATTEMPTS if world.all_reduce_min(int(fits)) else 0):
        if num_blocks < 2:
            break
        cache: KvCache | None = None
        try:
            cache = _cache(engine, plan, num_blocks)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if world.all_reduce_min(int(cache is not None)):
            assert cache is not None
            return cache
        cache = None
        if plan.memory is not None:
            plan.memory.rest()
        logger.warning(
            "Could not allocate %d blocks, although the memory was free when it was measured; trying fewer", num_blocks
        )
        num_blocks = int(num_blocks * SMALLER)
    # A CPU's cache has the size that options say, and not what is left.
    remedy = "lower --max-batch-prefill-tokens or raise --cuda-memory-fraction" if plan.memory is not None else (
        "give a lower --kv-cache-memory or --max-batch-total-tokens"
    )  # fmt: skip
    raise WarmUpMemoryError(
        f"{NOT_ENOUGH_MEMORY} a KV cache in addition to {request.max_prefill_tokens} prefill tokens; "
        f"{remedy}{_or_remedies(engine)} ({_left(plan).line()})"
    )


def _cache(engine: Engine, plan: MemoryPlan, num_blocks: int) -> KvCache:
    options = engine.options
    return KvCache(engine.runner.kv_shapes, num_blocks, options.block_size, plan.dtype, options.device)


def _try_step(engine: Engine, plan: MemoryPlan, requests: list[NewRequest], max_tokens: int | None) -> str | None:
    """Run the warm-up batch (cut to `max_tokens`), over a cache that just holds it.

    Returns:
        The error of the first failed row.
    """
    kept: list[NewRequest] = []
    budget = max_tokens
    for request in requests:
        if budget is not None:
            if budget <= 0:
                break
            request = dataclasses.replace(request, input_ids=request.input_ids[:budget])
            budget -= len(request.input_ids)
        kept.append(request)
    prefix_length = engine.runner.traits.prefix_length
    numbered = number_blocks(kept, engine.options.block_size, prefix_length, keep_last=True)
    kept = [
        dataclasses.replace(r, blocks=b, is_trial=True, state_slot=number)
        for number, (r, b) in enumerate(zip(kept, numbered, strict=True))
    ]
    used_blocks = sum(map(len, numbered))
    engine.set_cache(_cache(engine, plan, max(2, used_blocks)))  # graphs are measured over it: block 0 and another
    if plan.memory is not None:
        plan.memory.start()
    # Beside the step, as in those of requests.
    tried = [feature.try_out(largest=plan.memory is not None) for feature in engine.steps.features]
    result = engine.submit_prefill(PrefillCall(batch_id=0, sequence=0), kept)()
    generations = result.generations
    if result.batch is not None:
        generations = generations + engine.submit_decode(DecodeCall(batch_ids=(0,), sequence=1))().generations
    if plan.memory is not None and kept:
        engine.try_sampling(kept[0].sampling, MOST_SAMPLED_ROWS)
    del tried
    return next((g.error for g in generations if g.error is not None), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_limits(engine: Engine, max_total_tokens: int | None, max_batch_total_tokens: int | None) -> None:
    rows, least = engine.runner.traits.position_rows, 2 * engine.options.block_size
    if rows is not None and max_total_tokens is not None and max_total_tokens > rows:
        raise StartupError(
            f"--max-total-tokens {max_total_tokens}: this model has learned {rows} positions and cannot compute more; "
            f"use at most {rows}"
        )
    if max_batch_total_tokens is not None and max_batch_total_tokens < least:
        raise StartupError(
            f"--max-batch-total-tokens {max_batch_total_tokens} leaves no KV cache, which is made of blocks of "
            f"{engine.options.block_size} tokens, the first of them reserved; give at least {least}"
        )


def _limits(engine: Engine, plan: MemoryPlan, request: WarmupRequest, num_blocks: int) -> Capacity:
    """Return the user's limits, or what cache, model and one prefill allow."""
    total_tokens = num_blocks * engine.options.block_size
    max_total = request.max_total_tokens
    if max_total is None:
        bounds = [total_tokens, plan.model_max_length, engine.runner.max_positions]
        if not any(bounds[1:]) and not block_bytes(engine, plan.dtype):
            bounds.append(kv_memory.MOST_TOKENS)
        if not engine.options.chunking:
            bounds.append(request.max_prefill_tokens)
        max_total = min(b for b in bounds if b)
    max_input = request.max_input_tokens if request.max_input_tokens is not None else max(max_total - 1, 1)
    return Capacity(total_tokens, max_input, max_total)
