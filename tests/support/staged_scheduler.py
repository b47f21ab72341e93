"""The router's scheduler on the engines of a pipeline's stages, all in one process: device threads, and calls that come
to each stage when they like."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any

import torch
from support.engine_shard import BLOCK, EngineShard
from support.factories import RecordingMetrics, make_limits
from support.graph_doubles import CapturableStageRunner, PlainGraphCapture, copying_staging
from support.stage_mailboxes import stage_links

from model_server.distributed.group import ProcessGroup
from model_server.distributed.stage_links import StageLinks
from model_server.engine.device_thread import DeviceThread
from model_server.engine.warm_up import Capacity, WarmupRequest
from model_server.memory.kv_cache import KvCache
from model_server.rpc.servicer import Servicer, ShardFacts
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.runner import ModelInputs
from model_server.text.tokenizer import Tokenizer
from router.scheduling.loop import Scheduler
from router.shards.interface import ShardError
from router.shards.pool import ShardPool
from router.shards.warm_up import WarmUpPlan

Forward = tuple[list[int], list[int]]
STOP_LIMIT_S = 60.0


class NotingRunner(CapturableStageRunner):
    """Notes positions and slots of each forward."""

    def __init__(self, vocab_size: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__(vocab_size=vocab_size, is_first=is_first, is_last=is_last)
        self.forwards: list[Forward] = []

    def forward(self, inputs: ModelInputs, cache: KvCache) -> torch.Tensor:
        self.forwards.append((inputs.positions.tolist(), inputs.attention.slots.tolist()))
        return super().forward(inputs, cache)


class Stage:
    """One rank, as `model_server.shard` puts it together; `send` makes it the router's client."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        rank: int,
        links: StageLinks | None,
        num_stages: int,
        dice: random.Random,
        *,
        graphs: bool,
    ) -> None:
        """graphs: decode steps are replayed."""
        self.runner = NotingRunner(
            tokenizer.vocab_size, is_first=rank == 0, is_last=links is None or links.is_last
        )  # fmt: skip
        replays = GraphedRunner(self.runner, (4, 2, 1), PlainGraphCapture())
        shard = EngineShard(
            tokenizer, rank=rank, world_size=num_stages, budget=9, grows=True, links=links,
            runner=replays if graphs else self.runner,  # type: ignore[arg-type]
        )  # fmt: skip
        if graphs:
            shard.engine.steps.staging = copying_staging()
        self._dice = dice
        self.device = DeviceThread(
            torch.inference_mode, print, lambda error: True, most_pending=num_stages + 1, look_every_s=1e-3
        )
        if links is not None:
            links.on_tokens = self.device.look
        facts = ShardFacts(
            dtype="torch.float32", device_type="cpu", attention_impl="paged", block_size=BLOCK, chunking=True,
            prefix_caching=True, grows=True, urls=(), kv_cache_dtype="torch.float32", quantize=None,
            micro_batches=1 if num_stages == 1 else num_stages + 1,
        )  # fmt: skip

        def warm(asked: WarmupRequest) -> Capacity:
            shard.engine.start(asked.session)
            cache = shard.engine.cache
            if graphs:
                replays.capture(cache, 100, ProcessGroup())
                assert replays.captured_sizes == (1, 2, 4)
            return Capacity(cache.num_blocks * BLOCK, 100, 200)

        self._servicer = Servicer(shard.engine, self.device, facts, warm)
        self.device.start()

    def send(self, rpc: Any, request: Any, timeout_s: float | None = None) -> Awaitable[Any]:
        copy = type(request)()
        copy.CopyFrom(request)
        late_s = self._dice.choice([0, 0, 1e-3])
        return asyncio.ensure_future(self._answer(rpc, copy, late_s))

    async def _answer(self, rpc: str, request: Any, late_s: float) -> Any:
        if late_s:
            await asyncio.sleep(late_s)
        return await getattr(self._servicer, rpc)(request, Refusing())

    async def close(self) -> None:
        self.device.stop(STOP_LIMIT_S)


class Refusing:
    """The context of a call."""

    async def abort(self, code: object, text: str) -> None:
        raise ShardError(text, fatal=False)


@dataclass
class StagedHarness:
    """A running scheduler and the stages behind it."""

    stages: list[Stage]
    scheduler: Scheduler
    metrics: RecordingMetrics = field(default_factory=RecordingMetrics)


@contextlib.asynccontextmanager
async def staged_scheduler(
    tokenizer: Tokenizer, num_stages: int, dice: random.Random, *, graphs: bool = False, **limits: Any
) -> AsyncIterator[StagedHarness]:
    """At the end nothing is left: no block is taken, and every stage has computed the same rows in the same order."""
    links: list[StageLinks | None] = [None] if num_stages == 1 else [*stage_links(num_stages)]
    stages = [Stage(tokenizer, rank, link, num_stages, dice, graphs=graphs) for rank, link in enumerate(links)]
    pool = ShardPool(stages)
    await pool.clear_all()
    info = await pool.info()
    await pool.warm_up(
        WarmUpPlan(max_input_tokens=None, max_prefill_tokens=9, max_total_tokens=None, max_batch_size=None)
    )
    metrics = RecordingMetrics()
    scheduler = Scheduler(pool, info, make_limits(**limits), metrics, max_step_s=STOP_LIMIT_S)
    task = asyncio.create_task(scheduler.run())
    try:
        yield StagedHarness(stages, scheduler, metrics)
        await scheduler.drain()
        allocator = scheduler.allocator
        assert allocator is not None and allocator.num_free == allocator.num_usable
        assert scheduler.failure is None
        assert all(stage.runner.forwards == stages[0].runner.forwards for stage in stages)
    finally:
        await scheduler.close()
        await task
        await pool.close()
