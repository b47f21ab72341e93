"""From a socket path to a scheduler that may serve: find the shards, ask them, warm them up, settle the limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.limits import ServingLimits, ShardInfo
from router.scheduling.loop import Scheduler
from router.scheduling.ports import Metrics
from router.shards.pool import ShardPool


class StartupOptions(Protocol):
    """What this file reads of `RouterConfig`."""

    @property
    def master_shard_uds_path(self) -> str: ...
    @property
    def max_concurrent_requests(self) -> int: ...
    @property
    def max_best_of(self) -> int: ...
    @property
    def max_stop_sequences(self) -> int: ...
    @property
    def max_top_n_tokens(self) -> int: ...
    @property
    def max_client_batch_size(self) -> int: ...
    @property
    def max_input_tokens(self) -> int | None: ...
    @property
    def max_total_tokens(self) -> int | None: ...
    @property
    def waiting_served_ratio(self) -> float: ...
    @property
    def max_batch_prefill_tokens(self) -> int: ...
    @property
    def max_batch_total_tokens(self) -> int | None: ...
    @property
    def max_waiting_tokens(self) -> int: ...
    @property
    def max_batch_size(self) -> int | None: ...
    @property
    def max_step_seconds(self) -> float: ...


@dataclass(frozen=True)
class Started:
    """A server that is ready to serve; its owner runs `scheduler.run()` and closes `shards` at the end."""

    info: ShardInfo
    limits: ServingLimits
    scheduler: Scheduler
    shards: ShardPool


async def connect_and_warm_up(
    config: StartupOptions, metrics: Metrics, *, max_positions: int | None, tokenizer_max_length: int | None
) -> Started:
    """ServiceDiscovery, ClearCache, Info, Warmup, limits. Raises `StartupError` that names the cause or the flag."""
    raise NotImplementedError
