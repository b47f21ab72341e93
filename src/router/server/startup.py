"""From a socket path to a scheduler: discovery, warm-up, limits."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TypeVar

from router.config import RouterConfig
from router.errors import ArgumentValidation, BackendError, StartupError
from router.limits import ServingLimits, ShardInfo
from router.metrics import Metrics
from router.scheduling.loop import Scheduler
from router.scheduling.queue.fair import KeyWork
from router.scheduling.replicas.gauges import Gauges, ReplicaMetrics
from router.scheduling.replicas.replicas import Replicas, Served
from router.shards.client import LEASE_S, Client, ShardClient
from router.shards.interface import ShardError, Shards
from router.shards.pool import HEALTH_TIMEOUT_S, ShardPool
from router.shards.traced import TracedClient, TracedShards
from router.shards.warm_up import Capacity, WarmUpPlan
from wire.decoder_blocks import most_between
from wire.rpc.mutual_tls import MutualTls
from wire.tracing import Tracing
from wire.warm_up import NOT_ENOUGH_MEMORY

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Bounds of `tokens_of_a_step`.
CPU_STEP_TOKENS, CPU_DEFAULT_STEP_TOKENS = 1024, 256
GPU_STEP_TOKENS, GPU_DEFAULT_STEP_TOKENS = 4096, 2048


@dataclass(frozen=True)
class Started:
    """A server ready for `scheduler.run()`; `shards` are to be closed."""

    info: ShardInfo
    limits: ServingLimits
    scheduler: Scheduler | Replicas
    shards: ShardPool | ReplicaPools


@dataclass(frozen=True)
class ReplicaPools:
    """The shards of all replicas."""

    replicas: Replicas

    async def close(self) -> None:
        await self.replicas.close_shards()


async def connect_replicas(
    config: RouterConfig,
    metrics: Metrics,
    *,
    max_positions: int | None,
    tokenizer_max_length: int | None,
    tracing: Tracing | None = None,
) -> Started:
    """Start all replicas of a model, or the only one."""
    paths = [config.master_shard_uds_path, *config.replica_uds_paths]
    start = functools.partial(
        connect_and_warm_up,
        max_positions=max_positions,
        tokenizer_max_length=tokenizer_max_length,
        tracing=tracing,
        key_work=KeyWork(),
    )
    if len(paths) == 1:
        return await start(config, metrics)
    if config.lora_root is not None:
        raise StartupError("`--lora-root` and several replicas exclude each other")
    gauges = Gauges(metrics)

    async def start_replica(number: int) -> Started:
        own = replace(config, master_shard_uds_path=paths[number], replica_uds_paths=[])
        return await start(own, ReplicaMetrics(metrics, gauges, number))

    async def again(number: int) -> Served:
        started = await start_replica(number)
        assert isinstance(started.scheduler, Scheduler)
        return started.scheduler, started.shards

    for number in range(len(paths)):
        metrics.add_values("replica", [str(number)])
    all_started: list[Started] = []
    try:
        for number in range(len(paths)):
            all_started.append(await start_replica(number))
    except BaseException:
        for started in all_started:
            await started.shards.close()
        raise
    served = [(each.scheduler, each.shards) for each in all_started if isinstance(each.scheduler, Scheduler)]
    replicas = Replicas(served, again, metrics, gauges, config.replica_policy)
    limits = replace(
        all_started[0].limits,
        max_total_tokens=min(started.limits.max_total_tokens for started in all_started),
        max_input_tokens=min(started.limits.max_input_tokens for started in all_started),
        max_batch_total_tokens=min(started.limits.max_batch_total_tokens for started in all_started),
    )
    logger.info("%d replicas serve; requests are placed by the policy %s", len(paths), config.replica_policy)
    return Started(info=all_started[0].info, limits=limits, scheduler=replicas, shards=ReplicaPools(replicas))


async def connect_and_warm_up(
    config: RouterConfig,
    metrics: Metrics,
    *,
    max_positions: int | None,
    tokenizer_max_length: int | None,
    tracing: Tracing | None = None,
    key_work: KeyWork | None = None,
) -> Started:
    """Discover, clear, inform, warm up, and resolve limits."""
    shards, info = await connected(config, tracing)
    try:
        if info.task != "generate":
            raise BackendError(f"the shards' task is {info.task}, the router's is generate: give both the same --task")
        prefill_tokens, capacity = await _warm_up(config, shards, info)
        limits = resolve_limits(
            config,
            info,
            capacity,
            max_positions=max_positions,
            tokenizer_max_length=tokenizer_max_length,
            prefill_tokens=prefill_tokens,
        )
    except BaseException:
        await shards.close()
        raise
    metrics.gauge("tgi_batch_max_total_tokens", limits.max_batch_total_tokens)
    logger.info("Setting max batch total tokens to %d", limits.max_batch_total_tokens)  # TGI's words, which are watched
    logger.info("serving with %s", limits)
    if info.chunks:
        logger.info("prefills are chunked: --waiting-served-ratio and --max-waiting-tokens have no effect")
    if limits.max_batch_prefill_tokens < prefill_tokens:
        logger.info(
            "a step computes at most %d tokens of prompts (%d without a backlog); --max-step-prefill-tokens sets "
            "another bound",
            limits.max_batch_prefill_tokens,
            limits.default_prefill_tokens,
        )
    seen: Shards = shards if tracing is None else TracedShards(shards, tracing)
    scheduler = Scheduler(
        seen,
        info,
        limits,
        metrics,
        max_step_s=config.max_step_seconds,
        max_request_s=config.max_request_seconds,
        max_unread_bytes=config.max_unread_bytes,
        key_work=key_work,
    )
    num_blocks = scheduler.allocator.num_usable
    metrics.inform("tgi_cache_config_info", block_size=info.block_size, num_gpu_blocks=num_blocks)
    return Started(info=info, limits=limits, scheduler=scheduler, shards=shards)


async def connected(config: RouterConfig, tracing: Tracing | None) -> tuple[ShardPool, ShardInfo]:
    """Return cleared shards, and their facts."""
    lease_s = config.lease_seconds
    connect = functools.partial(_connect, config, tracing)
    health_timeout_s = HEALTH_TIMEOUT_S if lease_s is None else lease_s / 2
    discovery = ShardPool.discover(config.master_shard_uds_path, connect, health_timeout_s=health_timeout_s)
    shards = await _or_refuse(discovery, "connect to the Python model shards")
    try:
        await _or_refuse(shards.clear_all(), "clear the Python model shards cache")
        return shards, await _or_refuse(shards.info(), "get the Python model shards info")
    except BaseException:
        await shards.close()
        raise


def _connect(config: RouterConfig, tracing: Tracing | None, url: str) -> Client:
    tls = MutualTls.of(config.group_tls_cert, config.group_tls_key, config.group_tls_ca)
    client = ShardClient(url, config.group_token, tls=tls, lease_s=config.lease_seconds or LEASE_S)
    return client if tracing is None else TracedClient(client, tracing)


async def _warm_up(config: RouterConfig, shards: ShardPool, info: ShardInfo) -> tuple[int, Capacity]:
    """Return the prefill budget that fits, halved down to `config`'s least, and capacity."""
    least = config.min_batch_prefill_tokens
    if least is not None and not info.chunks:
        least = max(least, config.max_input_tokens or 1)  # a prompt is computed in one prefill
    budget = config.max_batch_prefill_tokens
    while True:
        plan = WarmUpPlan(
            max_input_tokens=config.max_input_tokens,
            max_prefill_tokens=tokens_of_a_step(budget, config.max_step_prefill_tokens, info)[0],
            max_total_tokens=config.max_total_tokens,
            max_batch_size=_most_requests(config, info),
        )
        try:
            capacity = await shards.warm_up(plan)
        except ShardError as error:
            smaller = 0 if least is None else max(plan.max_prefill_tokens // 2, least)
            if error.fatal or NOT_ENOUGH_MEMORY not in str(error) or not 0 < smaller < plan.max_prefill_tokens:
                raise BackendError(f"Unable to warmup the Python model shards: {_describe(error)}") from error
            budget = smaller
            logger.warning("%s; trying again with a prefill budget of %d tokens", error, budget)
        except ValueError as error:
            raise BackendError(f"Unable to warmup the Python model shards: {_describe(error)}") from error
        else:
            holds = capacity.total_tokens
            if least is None or not least <= holds < budget:
                return budget, capacity
            # Another warm-up, because shards and router must have the same budget.
            budget = holds
            logger.warning("the KV cache holds %d tokens: trying again with that prefill budget", holds)


def tokens_of_a_step(max_batch_prefill_tokens: int, asked: int | None, info: ShardInfo) -> tuple[int, int]:
    """Return a step's most prompt tokens, and the usual ones."""
    # Where prompts are computed whole: `max_batch_prefill_tokens`. In chunks at most what was asked for, else the
    # bounds of the device. A step's time grows with its tokens, and running requests wait for it: TGI's formula gives a
    # large GPU steps of more than a second. Matrix products of more rows are hardly more efficient (on a CPU 256 to
    # 4096 rows gain nothing), so throughput stays.
    if not info.chunks:
        if asked is not None:
            raise BackendError(
                "`--max-step-prefill-tokens`: this model computes each prompt in one step; leave it unset"
            )
        return max_batch_prefill_tokens, max_batch_prefill_tokens
    if asked is not None:
        most, default = asked, asked
    elif info.device_type == "cpu":
        most, default = CPU_STEP_TOKENS, CPU_DEFAULT_STEP_TOKENS
    else:
        most, default = GPU_STEP_TOKENS, GPU_DEFAULT_STEP_TOKENS
    return min(max_batch_prefill_tokens, most), min(max_batch_prefill_tokens, default)


def resolve_limits(
    config: RouterConfig,
    info: ShardInfo,
    capacity: Capacity,
    *,
    max_positions: int | None,
    tokenizer_max_length: int | None,
    prefill_tokens: int | None = None,
) -> ServingLimits:
    """Bound what was asked for by the shards.

    Args:
        prefill_tokens: The budget, if not the one asked for.
    """
    prefill = config.max_batch_prefill_tokens if prefill_tokens is None else prefill_tokens
    _check_echo("max_input_tokens", config.max_input_tokens, capacity.max_input_tokens)
    _check_echo("max_total_tokens", config.max_total_tokens, capacity.max_total_tokens)
    max_total_tokens = capacity.max_total_tokens
    if config.max_total_tokens is None:
        one_prefill = None if info.chunks else prefill
        bounds = (max_total_tokens, one_prefill, max_positions, tokenizer_max_length)
        max_total_tokens = min(bound for bound in bounds if bound is not None)
    max_batch_total_tokens = _batch_total(config, capacity)
    if max_total_tokens > max_batch_total_tokens:
        if config.max_total_tokens is not None:
            raise BackendError(f"Not enough memory to handle `max_total_tokens={max_total_tokens}`")
        max_total_tokens = max_batch_total_tokens
    # Block 0 is reserved; the last token of a request is never stored.
    usable = (max_batch_total_tokens // info.block_size - 1) * info.block_size + 1
    usable -= most_between(info.decoder_prefix, info.block_size)
    max_total_tokens = min(max_total_tokens, usable)
    max_input_tokens = config.max_input_tokens
    if max_input_tokens is None:
        max_input_tokens = max_total_tokens - 1
        if not info.chunks:
            max_input_tokens = min(max_input_tokens, prefill)
    _check_order(info, prefill, max_input_tokens, max_total_tokens, max_batch_total_tokens)
    step_tokens, default_step_tokens = tokens_of_a_step(prefill, config.max_step_prefill_tokens, info)
    return ServingLimits(
        max_concurrent_requests=config.max_concurrent_requests,
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        max_client_batch_size=config.max_client_batch_size,
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_total_tokens,
        max_batch_prefill_tokens=step_tokens,
        default_prefill_tokens=default_step_tokens,
        max_batch_total_tokens=max_batch_total_tokens,
        max_batch_size=_most_requests(config, info),
        max_waiting_tokens=config.max_waiting_tokens,
        waiting_served_ratio=config.waiting_served_ratio,
        has_priorities=config.has_priorities,
    )


def _most_requests(config: RouterConfig, info: ShardInfo) -> int | None:
    """Return the most requests that run at once, each of which needs a slot where layers keep states."""
    return min((most for most in (config.max_batch_size, info.state_slots) if most), default=None)


def _batch_total(config: RouterConfig, capacity: Capacity) -> int:
    """Return the KV tokens to hand out, within the user's bound."""
    asked = config.max_batch_total_tokens
    if asked is not None and asked > capacity.total_tokens:
        logger.warning("--max-batch-total-tokens %d: the shards can hold %d tokens", asked, capacity.total_tokens)
    return capacity.total_tokens if asked is None else min(asked, capacity.total_tokens)


def _check_echo(name: str, asked: int | None, answered: int) -> None:
    if answered <= 0 or (asked is not None and answered != asked):
        raise ArgumentValidation(f"--{name.replace('_', '-')} is {asked}, but the model shards answered {answered}")


def _check_order(info: ShardInfo, prefill: int, max_input_tokens: int, max_total_tokens: int, batch_total: int) -> None:
    if max_input_tokens >= max_total_tokens or max_input_tokens < 1:
        raise ArgumentValidation(
            f"--max-input-tokens must be below --max-total-tokens. Given: {max_input_tokens} and {max_total_tokens}"
        )
    if max_input_tokens > prefill and not info.chunks:
        raise ArgumentValidation(
            f"--max-batch-prefill-tokens must be at least --max-input-tokens. Given: {prefill} and {max_input_tokens}"
        )
    if prefill > batch_total:
        raise ArgumentValidation(
            f"--max-batch-prefill-tokens must not exceed --max-batch-total-tokens. Given: {prefill} and {batch_total}"
        )


async def _or_refuse(answer: Awaitable[T], task: str) -> T:
    try:
        return await answer
    except (ShardError, ValueError) as error:
        raise BackendError(f"Unable to {task}: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    if isinstance(error, ShardError) and error.fatal:
        return f"Could not connect to Text Generation server: {error.detail}"
    return f"Server error: {error}"
