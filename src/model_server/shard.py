"""Puts one shard together: device, ranks, weights, engine, device thread, gRPC server; and takes it apart again."""

from __future__ import annotations

import asyncio
import logging
import time

import torch

from model_server.attention.choice import select_backend
from model_server.config import ServeConfig
from model_server.device import resolve_device, resolve_dtype, tune
from model_server.device_thread import DeviceThread
from model_server.distributed import ProcessGroup, connect
from model_server.engine import Engine, EngineOptions
from model_server.memory import Capacity, MemoryPlan, WarmupRequest, warm_up
from model_server.models.load import load_runner
from model_server.rpc.interceptor import is_fatal
from model_server.rpc.server import ShardServer, claim_socket, socket_path
from model_server.rpc.servicer import Servicer, ShardFacts
from model_server.sampling.sampler import Sampler
from model_server.tokenizer import Tokenizer
from model_server.weights.locate import resolve, weight_files

logger = logging.getLogger(__name__)

# Seconds between two lines about a long load.
PROGRESS_EVERY_S = 2.0


def run_shard(config: ServeConfig) -> None:
    """Serve until a signal. Raises StartupError, or what ended the shard."""
    rank, world_size = (config.rank, config.world_size) if config.sharded else (0, 1)
    path = socket_path(config.uds_path, rank)
    claim_socket(path)  # before minutes of loading; again when it is bound
    model_dir = resolve(config.model_id, config.revision)
    device = resolve_device(rank, world_size)
    file_bytes = sum(f.stat().st_size for f in weight_files(model_dir))
    dtype = resolve_dtype(config.dtype, device, file_bytes)
    num_threads = tune(device, world_size, file_bytes)
    logger.info("Device %s, %s, %d CPU threads", device, dtype, num_threads)
    group = connect(rank, world_size, device, address=config.master_addr, port=config.master_port)
    try:
        attention = select_backend(config.attention, device)
        runner = load_runner(
            model_dir, device=device, dtype=dtype, group=group, attention=attention,
            progress=_Progress(),
        )  # fmt: skip
        tokenizer = Tokenizer.load(model_dir)
        sampler = Sampler(
            runner.vocab_size, device,
            watermark_gamma=config.watermark_gamma, watermark_delta=config.watermark_delta,
        )  # fmt: skip
        options = EngineOptions(
            device=device, rank=rank, world_size=world_size, block_size=attention.block_size,
            prompt_logprobs_allowed=config.request_logprobs,
        )  # fmt: skip
        engine = Engine(runner, tokenizer, sampler, options)
        facts = ShardFacts(
            dtype=str(dtype), device_type=device.type, attention_impl=attention.tgi_name,
            block_size=attention.block_size,
            urls=tuple(f"unix://{socket_path(config.uds_path, r)}" for r in range(world_size)),
        )  # fmt: skip
        plan = MemoryPlan(
            dtype=dtype, max_batch_total_tokens=config.max_batch_total_tokens,
            cuda_memory_fraction=config.cuda_memory_fraction, model_max_length=tokenizer.model_max_length,
        )  # fmt: skip
        asyncio.run(_serve(config, rank, engine, group, facts, plan))
    finally:
        group.close()


async def _serve(
    config: ServeConfig, rank: int, engine: Engine, group: ProcessGroup, facts: ShardFacts, plan: MemoryPlan
) -> None:
    def warm(asked: WarmupRequest) -> Capacity:
        return warm_up(engine, group, plan, asked)

    servers: list[ShardServer] = []
    device = DeviceThread(
        enter=torch.inference_mode, on_fatal=lambda error: servers[0].request_stop(error), is_fatal=is_fatal
    )
    server = ShardServer(Servicer(engine, device, facts, warm), socket_path(config.uds_path, rank))
    servers.append(server)
    device.start()
    try:
        await server.serve()
    finally:
        # A rank whose peer is gone may never come back from a collective: do not wait for ever.
        device.stop(timeout_s=5.0)


class _Progress:
    """Says now and then how much of the weights is there."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._last >= PROGRESS_EVERY_S:
            self._last = time.monotonic()
            logger.info("Loading weights: layer %d of %d (%d %%)", done, total, 100 * done // max(total, 1))
