"""Puts one shard together, and takes it apart again."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
import uvloop

from model_server.attention.choice import AttentionChoice
from model_server.batch.feature import ModelFeature
from model_server.config import ServeConfig, threads_are_set
from model_server.device import enter, finish_loading, resolve_device, resolve_dtype, tune
from model_server.distributed.group import ProcessGroup, connect
from model_server.distributed.layout import Axis, Layout, Ranks
from model_server.distributed.placement import Placement
from model_server.distributed.stage_links import StageLinks
from model_server.engine.device_thread import LOOK_EVERY_S, DeviceThread
from model_server.engine.engine import Engine, EngineOptions
from model_server.engine.memory_plan import MemoryPlan, plan_memory
from model_server.engine.profile import StepProfiler
from model_server.engine.steps.maker import StepMaker
from model_server.engine.warm_up import Capacity, WarmupRequest, warm_up
from model_server.errors import LostPeerError, StartupError, parts_ranks
from model_server.features.adapters.load import describe_adapters, load_adapters
from model_server.features.adapters.residents import Residents
from model_server.features.drafts.drafters.drafter import DraftedRunner
from model_server.features.drafts.load import (
    LOOKUP,
    can_draft,
    check_window_rows,
    find_speculator,
    load_drafts,
)
from model_server.features.images.load import load_images
from model_server.models.load import load_runner
from model_server.models.model import Model, cache_dtype, check_batch_invariance, describe
from model_server.models.stages import layer_counts
from model_server.recurrence.states import reserve_states
from model_server.rpc.endpoint import EndpointPlan, endpoint_of
from model_server.rpc.interceptor import is_fatal
from model_server.rpc.lora import LoraServicer
from model_server.rpc.server import ShardServer
from model_server.rpc.servicer import Servicer, ShardFacts
from model_server.rpc.sockets import claim_socket, socket_path
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.graph_capture import CudaGraphCapture
from model_server.runner.graph_choice import with_graphs
from model_server.runner.graph_sizes import decode_rows, graph_sizes, window_sizes
from model_server.runner.runner import Runner
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import Checkpoint
from model_server.weights.load_progress import LoadProgress
from wire import phases
from wire.speculation.heads import check_length
from wire.text.counting import counted
from wire.tracing import Tracing, TracingError

logger = logging.getLogger(__name__)

# A rank whose peer is gone may never come back from a collective: the end does not wait longer for it.
STOP_LIMIT_S = 5.0
# Tokens that recurrent layers compute at once on a GPU.
_DEVICE_GRID = 64


def run_shard(config: ServeConfig, checkpoint: Checkpoint) -> None:
    """Serve `checkpoint` until a signal or a failure."""
    layout = Layout.of(*config.place, num_stages=config.num_stage, num_nodes=config.num_nodes)
    rank = layout.world.rank
    tracing = _tracing(config)
    claim_socket(socket_path(config.uds_path, rank))  # before minutes of loading; again when it is bound
    tokenizer = Tokenizer.load(checkpoint.directory)  # what is wrong with it is said before minutes of loading
    found = None if config.speculator is None else find_speculator(config.speculator, tokenizer, checkpoint.directory)
    asked = config.speculator, config.speculate
    if found is not None and found.heads is not None:
        config = replace(config, speculate=check_length(found.heads, config.speculate, StartupError))
    rows = decode_rows(config.max_batch_size, config.num_drafted, config.most_window_rows)
    graphs = graph_sizes(config.cuda_graphs, rows)
    model = _describe(config, checkpoint, layout)
    layout = replace(layout, layer_counts=layer_counts(model, config.num_stage, config.stage_layers))
    device = resolve_device(layout.local.rank, layout.local.size)
    check_window_rows(config.speculate_max_rows, config.num_drafted, device)
    model = describe_adapters(config, model, device)
    dtype = resolve_dtype(
        config.dtype,
        device,
        checkpoint.stored_in,
        needs_bfloat16=checkpoint.needs_bfloat16,
        is_native=model.spec is not None,
    )
    if config.batch_invariant:
        check_batch_invariance(model, device, dtype, layout.world.size)
        # Prompt tokens in a chunk, or computed again after a preemption, pass through another kernel.
        config = replace(config, prefill_chunking=False, prefix_caching=False)
        logger.info("Results do not depend on the batch (--batch-invariant): no chunks, shared prefixes or preemption")
    num_threads = tune(device, layout.local.size, checkpoint.file_bytes, keep_threads=threads_are_set())
    logger.info("Device %s, %s, %s", device, dtype, counted(num_threads, "CPU thread"))
    stored = cache_dtype(model, config.kv_cache_dtype, device, config.attention)
    attention = AttentionChoice(config.attention, device, dtype, stored, batch_invariant=config.batch_invariant)
    ranks = Ranks.of(_connect(config, layout.world, device), layout, device)
    runner: Runner | None = None
    orderly = False
    phases.enter(phases.LOADING)
    try:
        placement = Placement(device, dtype, ranks, stored, config.batch_invariant, config.num_drafted)
        runner = _load(config, model, placement, attention, captures=bool(graphs))
        adapters = load_adapters(config, model, runner, dtype, layout)
        residents = None if adapters is None else adapters.residents
        links = StageLinks(ranks, device) if layout.stage.size > 1 else None
        maker: StepMaker | None = None
        if can_draft(runner.traits, *asked, config.speculate_max_rows):
            runner, maker = load_drafts(config, found, model, runner, tokenizer.vocab_size, placement)
        if device.type == "cuda":
            windows = window_sizes(config.num_drafted, config.most_window_rows, config.max_batch_size)
            keeps = runner.retains if isinstance(runner, DraftedRunner) else None
            runner = with_graphs(runner, graphs, CudaGraphCapture(device), windows, keeps=keeps)
        images = load_images(config, model, runner, tokenizer, placement)
        finish_loading(device)  # drafter and tower are loaded, too
        if images is not None and images.reads_whole_prompts:
            logger.info(
                "Prompts are computed whole, as their tokens see each other both ways: no chunks, no shared prefixes"
            )
            config = replace(config, prefill_chunking=False, prefix_caching=False)
        features = tuple([one for one in (adapters, images) if one is not None])
        engine = _engine(config, runner, tokenizer, device, ranks, links, maker, features)
        states = reserve_states(runner.traits.recurrent, config, device, layout.local.size)
        facts = replace(
            announce(config, runner, device, dtype, layout, stored, model.scheme.method),
            state_slots=states.num_slots,
            images=images is not None,
            image_reserve=0 if images is None else images.reserve,
            speculator=None if maker is None else LOOKUP if found is None else found.kind,
            loads_adapters=residents is not None,
            adapter_slots=config.lora_slots if model.slots is None else model.slots.number,
        )
        plan = plan_memory(config, engine, stored or dtype, layout.local.size, states.num_bytes)
        profiler = _profiler(config, rank, device)
        path = socket_path(config.uds_path, rank)
        phases.enter(phases.BINDING)
        endpoint = endpoint_of(config, layout)
        serving = _serve(engine, ranks.world, links, facts, plan, path, endpoint, tracing, profiler, residents)
        orderly = uvloop.run(serving)
    finally:
        release_ranks(runner, ranks.world, orderly=orderly)
        if tracing is not None:
            tracing.close()


def _describe(config: ServeConfig, checkpoint: Checkpoint, layout: Layout) -> Model:
    """Describe the model by its files."""
    model = describe(checkpoint, rope_factor=config.linear_rope_factor, quantize=config.quantize, name=config.model_id)
    if model.scheme.method == "exl2" and layout.tensor.size > 1:
        raise StartupError("Sharding is currently not supported with `exl2` quantization")  # TGI's words
    for warning in model.warnings if layout.world.rank == 0 else ():
        logger.warning("%s", warning)
    return model


def _connect(config: ServeConfig, world: Axis, device: torch.device) -> ProcessGroup:
    """Meet the other ranks. Raises StartupError."""
    phases.enter(phases.PROCESS_GROUP)
    if world.size > 1:
        others = counted(world.size - 1, "other rank")
        logger.info("Connecting to %s at %s:%d", others, config.master_addr, config.master_port)
    return connect(
        world.rank,
        world.size,
        device,
        address=config.master_addr,
        port=config.master_port,
        timeout_s=config.dist_timeout,
        collective_timeout_s=config.collective_timeout,
        key_prefix=config.store_key_prefix,
        # Ranks of other nodes have other memory, which the check of the devices here does not see; with stages no sum
        # is one of all ranks.
        one_shot=not config.disable_custom_kernels and config.num_nodes == 1 and config.num_stage == 1,
    )


def _load(
    config: ServeConfig, model: Model, placement: Placement, attention: AttentionChoice, *, captures: bool
) -> Runner:
    """Load the model; `captures`: decode steps may be captured."""
    runner = load_runner(
        model,
        placement,
        attention,
        trust_remote_code=config.trust_remote_code,
        captures=captures,
        progress=LoadProgress(),
    )
    if placement.ranks.world.rank == 0:
        attention.log(
            runner.traits.attention, caching_asked=config.prefix_caching, encodes=bool(runner.traits.prefix_length)
        )  # fmt: skip
    return runner


def _engine(
    config: ServeConfig,
    runner: Runner,
    tokenizer: Tokenizer,
    device: torch.device,
    ranks: Ranks,
    links: StageLinks | None,
    maker: StepMaker | None,
    features: tuple[ModelFeature, ...],
) -> Engine:
    sampler = Sampler(
        runner.vocab_size, device, watermark_gamma=config.watermark_gamma, watermark_delta=config.watermark_delta
    )
    options = EngineOptions(
        device=device, layout=ranks.layout, block_size=runner.traits.block_size,
        prompt_logprobs_allowed=config.request_logprobs,
        chunking=config.prefill_chunking and not runner.traits.keeps_state, grows=_grows(config, runner),
        peers=ranks.tensor,
    )  # fmt: skip
    return Engine(runner, tokenizer, sampler, options, links, maker, features)


def _grows(config: ServeConfig, runner: Runner) -> bool:
    """Whether running requests get blocks as they need them."""
    return not runner.traits.keeps_state and not config.batch_invariant


def announce(
    config: ServeConfig,
    runner: Runner,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
    cache_dtype: torch.dtype | None = None,
    quantize: str | None = None,
) -> ShardFacts:
    """Return Info for the router."""
    traits = runner.traits
    return ShardFacts(
        dtype=str(dtype),
        device_type=device.type,
        # TGI's clients know no word for a model that no backend serves.
        attention_impl="paged" if traits.attention is None else traits.attention.tgi_name,
        block_size=traits.block_size,
        chunking=config.prefill_chunking and not traits.keeps_state,
        prefix_caching=config.prefix_caching and not traits.keeps_state and not traits.prefix_length,
        decoder_prefix=traits.prefix_length,
        grows=_grows(config, runner),
        kv_cache_dtype=str(cache_dtype or dtype),
        quantize=quantize,
        adapters=traits.adapters,
        speculate=config.num_drafted if traits.continues_from_blocks else 0,
        state_bytes=traits.recurrent_bytes,
        # On a GPU chunks of so many tokens are computed at once.
        state_grid=traits.block_size if device.type == "cpu" else max(traits.block_size, _DEVICE_GRID),
        # With one more than stages, each has its next step before it has finished one.
        micro_batches=1 if layout.stage.size == 1 else layout.stage.size + 1,
        urls=tuple(config.endpoints)
        or tuple(f"unix://{socket_path(config.uds_path, r)}" for r in range(layout.world.size)),
    )


def _tracing(config: ServeConfig) -> Tracing | None:
    if config.otlp_endpoint is None:
        return None
    try:
        return Tracing.to_collector(config.otlp_endpoint, config.otlp_service_name)
    except TracingError as error:
        raise StartupError(str(error)) from None


def _profiler(config: ServeConfig, rank: int, device: torch.device) -> StepProfiler | None:
    if config.profile is None:
        return None
    try:
        return StepProfiler(config.profile, rank, config.profile_steps, device)
    except OSError as error:
        raise StartupError(f"--profile {config.profile}: {error.strerror}") from None


async def _serve(
    engine: Engine,
    world: ProcessGroup,
    links: StageLinks | None,
    facts: ShardFacts,
    plan: MemoryPlan,
    path: Path,
    endpoint: EndpointPlan | None,
    tracing: Tracing | None,
    profiler: StepProfiler | None,
    residents: Residents | None,
) -> bool:
    """Serve until a stop; return whether the device thread ended."""

    def warm(asked: WarmupRequest) -> Capacity:
        phases.enter(phases.WARM_UP)
        capacity = warm_up(engine, world, plan, asked)
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
        return is_fatal(error) or (world.size > 1 and parts_ranks(error))

    device = DeviceThread(
        enter=lambda: enter(engine.options.device),
        on_fatal=on_fatal,
        is_fatal=ends_shard,
        # One step of each of the router's batches.
        most_pending=1 if links is None else links.num_stages + 1,
        look_every_s=LOOK_EVERY_S if links is None else 1.0,
    )
    if links is not None:
        links.on_tokens = device.look
    more = None if residents is None else LoraServicer(residents, device).add_to
    server = ShardServer(Servicer(engine, device, facts, warm), path, tracing, endpoint, more)
    world.on_lost(on_lost)
    device.start()
    try:
        await server.serve()
    finally:
        ended = device.stop(STOP_LIMIT_S)
    return ended


def release_ranks(runner: Runner | None, world: ProcessGroup, *, orderly: bool) -> None:
    """Leave the ranks; graphs first, since NCCL's communicator waits for their release (`commDestroySync`)."""
    try:
        if orderly and world.size > 1 and isinstance(runner, GraphedRunner):
            runner.release()
    finally:
        world.close(orderly=orderly)
