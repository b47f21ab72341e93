"""Puts one shard together: device, ranks, weights, engine, device thread, gRPC server; and takes it apart again."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch
import uvloop

from model_server.attention.backend import AttentionBackend
from model_server.attention.choice import select_backend, substitute
from model_server.attention.startup_records import SettledBackend, tell_attention
from model_server.config import ServeConfig
from model_server.device import enter, resolve_device, resolve_dtype, settle, tune
from model_server.distributed.group import ProcessGroup, connect
from model_server.engine.device_thread import DeviceThread
from model_server.engine.engine import Engine, EngineOptions
from model_server.engine.profile import StepProfiler
from model_server.engine.warm_up import Capacity, MemoryPlan, WarmupRequest, warm_up
from model_server.errors import LostPeerError, StartupError
from model_server.memory.budget import CudaMemory
from model_server.models.attention_layers import attention_layers_of
from model_server.models.load import load_runner
from model_server.rpc.interceptor import is_fatal
from model_server.rpc.server import ShardServer, claim_socket, socket_path
from model_server.rpc.servicer import Servicer, ShardFacts
from model_server.runner.cuda_graphs import GraphedRunner, graph_sizes, with_graphs
from model_server.runner.graph_capture import CudaRecorder
from model_server.runner.runner import KeepsState, Runner
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import Checkpoint
from model_server.weights.load_progress import LoadProgress
from wire import phases
from wire.tracing import Tracing, TracingError

logger = logging.getLogger(__name__)

# A rank whose peer is gone may never come back from a collective: the end does not wait longer for it.
STOP_LIMIT_S = 5.0


def run_shard(config: ServeConfig, checkpoint: Checkpoint) -> None:
    """Serve `checkpoint` until a signal. Raises StartupError, or what ended the shard."""
    rank, world_size = config.place
    graphs = graph_sizes(config.cuda_graphs, config.max_batch_size)
    tracing = _tracing(config)
    claim_socket(socket_path(config.uds_path, rank))  # before minutes of loading; again when it is bound
    model_dir = checkpoint.directory
    tokenizer = Tokenizer.load(model_dir)  # what is wrong with it is said before minutes of loading
    device = resolve_device(rank, world_size)
    dtype = resolve_dtype(config.dtype, device, checkpoint.file_bytes, needs_bfloat16=checkpoint.needs_bfloat16)
    num_threads = tune(device, world_size, checkpoint.file_bytes)
    logger.info("Device %s, %s, %d CPU threads", device, dtype, num_threads)
    attention = select_backend(config.attention, device, dtype, attention_layers_of(model_dir))
    phases.enter(phases.PROCESS_GROUP)
    if world_size > 1:
        logger.info("Meeting the other %d ranks at %s:%d", world_size - 1, config.master_addr, config.master_port)
    group = connect(
        rank,
        world_size,
        device,
        address=config.master_addr,
        port=config.master_port,
        timeout_s=config.dist_timeout,
        one_shot=not config.disable_custom_kernels,
    )
    runner: Runner | None = None
    orderly = False
    phases.enter(phases.LOADING)
    try:
        engine = _load_engine(config, model_dir, tokenizer, dtype, group, attention, device, graphs)
        runner = engine.runner
        facts = ShardFacts(
            dtype=str(dtype),
            device_type=device.type,
            attention_impl=attention.tgi_name,
            block_size=attention.block_size,
            chunking=engine.options.chunking,
            prefix_caching=config.prefix_caching and not engine.keeps_state,
            grows=not engine.keeps_state,
            urls=tuple(f"unix://{socket_path(config.uds_path, r)}" for r in range(world_size)),
        )
        plan = MemoryPlan(
            dtype=dtype,
            max_batch_total_tokens=config.max_batch_total_tokens,
            cuda_memory_fraction=config.cuda_memory_fraction,
            model_max_length=engine.tokenizer.model_max_length,
            memory=CudaMemory(device) if device.type == "cuda" else None,
            weight_bytes=_weight_bytes(runner, device),
        )
        profiler = _profiler(config, rank, device)
        path = socket_path(config.uds_path, rank)
        phases.enter(phases.BINDING)
        orderly = uvloop.run(_serve(engine, group, facts, plan, path, tracing, profiler))
    finally:
        leave(runner, group, orderly=orderly)
        if tracing is not None:
            tracing.close()


def _tracing(config: ServeConfig) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    try:
        return Tracing.to_collector(config.otlp_endpoint, config.otlp_service_name)
    except TracingError as error:
        raise StartupError(str(error)) from None


def _load_engine(
    config: ServeConfig,
    model_dir: Path,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    group: ProcessGroup,
    attention: AttentionBackend,
    device: torch.device,
    graphs: tuple[int, ...],
) -> Engine:
    settled = SettledBackend(attention, partial(substitute, requested=config.attention, device=device, dtype=dtype))
    runner = load_runner(
        model_dir,
        device=device,
        dtype=dtype,
        group=group,
        attention=attention,
        substitute=settled,
        trust_remote_code=config.trust_remote_code,
        rope_factor=config.linear_rope_factor,
        progress=LoadProgress(),
    )
    settle(device)
    if device.type == "cuda":
        runner = with_graphs(runner, graphs, CudaRecorder(device))
    sampler = Sampler(
        runner.vocab_size, device, watermark_gamma=config.watermark_gamma, watermark_delta=config.watermark_delta
    )
    options = EngineOptions(
        device=device,
        rank=group.rank,
        world_size=group.size,
        block_size=attention.block_size,
        prompt_logprobs_allowed=config.request_logprobs,
        chunking=config.prefill_chunking and not isinstance(runner, KeepsState),
    )
    engine = Engine(runner, tokenizer, sampler, options)
    if group.rank == 0:
        tell_attention(
            settled.backend.name,
            config.attention,
            caching_asked=config.prefix_caching,
            keeps_state=engine.keeps_state,
        )
    return engine


def _weight_bytes(runner: Runner, device: torch.device) -> int | None:
    """What the model takes, just after it was loaded; None where nobody has counted."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    counted = getattr(runner, "weight_bytes", None)
    return counted if isinstance(counted, int) else None


def _profiler(config: ServeConfig, rank: int, device: torch.device) -> StepProfiler | None:
    if config.profile is None:
        return None
    try:
        return StepProfiler(config.profile, rank, config.profile_steps, device)
    except OSError as error:
        raise StartupError(f"--profile {config.profile}: {error.strerror}") from None


async def _serve(
    engine: Engine,
    group: ProcessGroup,
    facts: ShardFacts,
    plan: MemoryPlan,
    path: Path,
    tracing: Tracing | None,
    profiler: StepProfiler | None,
) -> bool:
    """Until a stop is asked for. False: the device thread has not come to its end."""

    def warm(asked: WarmupRequest) -> Capacity:
        phases.enter(phases.WARM_UP)
        capacity = warm_up(engine, group, plan, asked)
        if profiler is not None:
            engine.profile(profiler)
        phases.enter(phases.READY)
        return capacity

    def on_fatal(error: BaseException) -> None:
        server.request_stop(error)

    def on_lost(message: str) -> None:
        if not server.is_stopping:  # else all are leaving
            server.request_stop(LostPeerError(message))

    def ends_shard(error: BaseException) -> bool:
        return is_fatal(error) or (group.size > 1 and parts_ranks(error))

    device = DeviceThread(enter=lambda: enter(engine.options.device), on_fatal=on_fatal, is_fatal=ends_shard)
    server = ShardServer(Servicer(engine, device, facts, warm), path, tracing)
    group.on_lost(on_lost)
    device.start()
    try:
        await server.serve()
    finally:
        ended = device.stop(STOP_LIMIT_S)
    return ended


def leave(runner: Runner | None, group: ProcessGroup, *, orderly: bool) -> None:
    """Leave the ranks. Recordings go first: before it ends, NCCL's communicator waits for every graph that holds one of
    its collectives to be gone (`commDestroySync`)."""
    try:
        if orderly and group.size > 1 and isinstance(runner, GraphedRunner):
            runner.release()
    finally:
        group.close(orderly=orderly)


def parts_ranks(error: BaseException) -> bool:
    """Whether a call failed for want of something that only this rank lacks: the others have gone on without it.

    Other exceptions come of what is asked, which is the same everywhere: the call fails alike on all ranks.
    """
    return isinstance(error, (MemoryError, OSError))
