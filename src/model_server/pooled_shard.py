"""Puts together a shard that gives vectors or scores."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvloop

from model_server.attention.choice import AttentionChoice
from model_server.config import ServeConfig, threads_are_set
from model_server.device import SMALL_MODEL_BYTES, enter, finish_loading, resolve_device, resolve_dtype, tune
from model_server.distributed.group import ProcessGroup, connect
from model_server.distributed.layout import Layout, Ranks
from model_server.distributed.placement import Placement
from model_server.engine.device_thread import DeviceThread
from model_server.errors import LostPeerError, StartupError
from model_server.models.model import describe_pooled
from model_server.models.stages import layer_counts
from model_server.pooling import loading
from model_server.pooling.plan import PoolingPlan, make_plan
from model_server.pooling.runner import PoolingRunner
from model_server.rpc.interceptor import is_fatal
from model_server.rpc.pooling import PooledShard, PoolingFacts, PoolingServicer
from model_server.rpc.server import ShardServer
from model_server.rpc.sockets import claim_socket, socket_path
from model_server.weights.checkpoint import Checkpoint
from model_server.weights.load_progress import LoadProgress
from wire import phases
from wire.pooling.files import read
from wire.pooling.task import FoundTask
from wire.text.counting import counted

logger = logging.getLogger(__name__)

# A rank whose peer is gone may never come back from a collective: the end does not wait longer for it.
STOP_LIMIT_S = 5.0


def run_pooled_shard(config: ServeConfig, checkpoint: Checkpoint, task: FoundTask) -> None:
    """Serve `checkpoint` until a signal or a failure."""
    _refuse(config, task)
    layout = Layout.of(*config.place, num_stages=1, num_nodes=1)
    rank = layout.world.rank
    path = socket_path(config.uds_path, rank)
    claim_socket(path)  # before minutes of loading; again when it is bound
    files = read(checkpoint.directory, checkpoint.fields, StartupError)
    plan = make_plan(task, files, checkpoint.fields, config.pooling, config.model_id, checkpoint.directory)
    model = describe_pooled(checkpoint, quantize=config.quantize, name=config.model_id)
    layout = replace(layout, layer_counts=layer_counts(model, 1, []))
    device = resolve_device(layout.local.rank, layout.local.size)
    dtype = resolve_dtype(
        config.dtype,
        device,
        checkpoint.stored_in,
        needs_bfloat16=checkpoint.needs_bfloat16,
        is_native=model.spec is not None,
    )
    # All CPUs: one step at a time is computed, and the router has little to do meanwhile.
    size = max(checkpoint.file_bytes, SMALL_MODEL_BYTES)
    num_threads = tune(device, layout.local.size, size, keep_threads=threads_are_set())
    logger.info("Device %s, %s, %s", device, dtype, counted(num_threads, "CPU thread"))
    attention = AttentionChoice(config.attention, device, dtype)
    ranks = Ranks.of(_connected(config, layout), layout, device)
    orderly = False
    phases.enter(phases.LOADING)
    try:
        placement = Placement(device, dtype, ranks, None)
        runner = loading.load(
            model,
            plan,
            placement,
            attention,
            trust_remote_code=config.trust_remote_code,
            progress=LoadProgress(),
        )
        finish_loading(device)
        if rank == 0:
            _log(plan, runner)
        facts = PoolingFacts(
            task=task.task,
            dtype=str(dtype),
            device_type=device.type,
            attention_impl="paged",
            quantize=model.scheme.method,
            urls=tuple(f"unix://{socket_path(config.uds_path, r)}" for r in range(layout.world.size)),
        )
        phases.enter(phases.BINDING)
        orderly = uvloop.run(_serve(runner, ranks.world, facts, path, placement))
    finally:
        ranks.world.close(orderly=orderly)


def _refuse(config: ServeConfig, task: FoundTask) -> None:
    """Options that only generation has. Raises StartupError."""
    asked = {
        "--num-stage": config.num_stage > 1,
        "--num-nodes": config.num_nodes > 1,
        "--lora-adapters": config.lora_adapters,
        "--lora-root": config.lora_root,
        "--speculate": config.speculate,
        "--speculator": config.speculator,
        "--kv-cache-dtype": config.kv_cache_dtype,
        "--rope-scaling": config.linear_rope_factor,
        "--batch-invariant": config.batch_invariant,
        "--profile": config.profile,
        "--otlp-endpoint": config.otlp_endpoint,
    }
    given = next((flag for flag, value in asked.items() if value), None)
    if given is not None:
        raise StartupError(
            f"{given} is for models that generate text; this one's task is {task.task} ({task.reason}): leave it out"
        )


def _connected(config: ServeConfig, layout: Layout) -> ProcessGroup:
    """Meet the other ranks. Raises StartupError."""
    phases.enter(phases.PROCESS_GROUP)
    local = layout.local
    return connect(
        layout.world.rank,
        layout.world.size,
        resolve_device(local.rank, local.size),
        address=config.master_addr,
        port=config.master_port,
        timeout_s=config.dist_timeout,
        collective_timeout_s=config.collective_timeout,
        key_prefix=config.store_key_prefix,
        one_shot=not config.disable_custom_kernels,
    )


def _log(plan: PoolingPlan, runner: PoolingRunner) -> None:
    pooling = f"pooling {plan.name} ({plan.reason}), " if plan.modes else ""
    count = counted(runner.dimensions, "dimension" if plan.task.task == "embed" else "score")
    logger.info("Task %s (%s), %s%s", plan.task.task, plan.task.reason, pooling, count)


async def _serve(
    runner: PoolingRunner, world: ProcessGroup, facts: PoolingFacts, path: Path, placement: Placement
) -> bool:
    """Serve until a stop; return whether the device thread ended."""

    def on_lost(message: str) -> None:
        if not server.is_stopping:  # else all are leaving
            server.request_stop(LostPeerError(message))

    def ends_shard(error: BaseException) -> bool:
        return is_fatal(error) or (world.size > 1 and isinstance(error, MemoryError | OSError))

    device = DeviceThread(
        enter=lambda: _entered(placement),
        on_fatal=lambda error: server.request_stop(error),
        is_fatal=ends_shard,
    )
    servicer = PoolingServicer(runner, device, lambda: phases.enter(phases.READY), world.rank)
    server = ShardServer(PooledShard(facts, device, placement.device), path, more=servicer.add_to)
    world.on_lost(on_lost)
    device.start()
    try:
        await server.serve()
    finally:
        ended = device.stop(STOP_LIMIT_S)
    return ended


@contextmanager
def _entered(placement: Placement) -> Iterator[None]:
    with enter(placement.device):
        yield
