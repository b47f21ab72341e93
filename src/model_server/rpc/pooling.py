"""The service of pooled models, and their part of generate.v3: facts, health, no steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import numpy as np
import torch

from model_server.engine.device_thread import DeviceThread, whole
from model_server.pooling.items import Item, Kind, StepResult
from model_server.pooling.runner import PoolingRunner
from model_server.rpc.interceptor import answering_errors
from wire.pooling.v1 import pooling_pb2 as pb
from wire.pooling.v1 import pooling_pb2_grpc as pb_grpc
from wire.protocol import PROTOCOL
from wire.v3 import generate_pb2 as generate_pb
from wire.v3 import generate_pb2_grpc as generate_grpc

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PoolingFacts:
    """What Info and ServiceDiscovery answer."""

    task: str
    dtype: str
    device_type: str
    attention_impl: str
    quantize: str | None
    urls: tuple[str, ...]


class PoolingServicer(pb_grpc.PoolingServicer):  # type: ignore[misc]  # generated code has no types
    """One shard's steps."""

    def __init__(self, runner: PoolingRunner, device: DeviceThread, on_ready: Callable[[], None], rank: int) -> None:
        """Take the runner; the first rank's answers hold the numbers."""
        self._runner = runner
        self._device = device
        self._on_ready = on_ready
        self._is_first = rank == 0

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_PoolingServicer_to_server(self, server)

    @answering_errors
    async def WarmUp(self, request: pb.WarmUpRequest, context: grpc.aio.ServicerContext) -> pb.WarmUpResponse:
        asked = request.max_input_tokens if request.HasField("max_input_tokens") else None

        def warm_up() -> int:
            longest = self._runner.warm_up(request.max_batch_tokens, asked)
            self._on_ready()
            return longest

        longest = await self._run(warm_up, request.sequence)
        plan = self._runner.plan
        return pb.WarmUpResponse(max_input_tokens=longest, dimensions=self._runner.dimensions, pooling=plan.name)

    @answering_errors
    async def Run(self, request: pb.RunRequest, context: grpc.aio.ServicerContext) -> pb.RunResponse:
        items = [_item(one) for one in request.items]
        return self._response(await self._run(lambda: self._runner.run(items), request.sequence))

    async def _run(self, work: Callable[[], T], sequence: int) -> T:
        # Shielded: a router that gives up on a call must not cancel the work, other ranks run it too.
        return await asyncio.shield(asyncio.wrap_future(self._device.enqueue(whole(work), sequence)))

    def _response(self, result: StepResult) -> pb.RunResponse:
        results = [
            pb.Result(
                id=one.id, values=one.values, rows=one.rows, columns=one.columns, indices=one.indices, error=one.error
            )
            for one in (result.results if self._is_first else ())
        ]
        return pb.RunResponse(
            results=results, forward_ns=result.forward_ns, total_ns=result.total_ns, phases_ns=result.phases_ns
        )


def _item(message: pb.Item) -> Item:
    return Item(
        id=message.id,
        input_ids=np.frombuffer(message.input_ids, dtype="<u4"),
        second_from=message.second_from,
        prompt_tokens=message.prompt_tokens,
        kind=Kind(message.kind),
        dimensions=message.dimensions,
        normalize=message.normalize,
    )


class PooledShard(generate_grpc.TextGenerationServiceServicer):  # type: ignore[misc]  # generated code has no types
    """What a shard answers that generates nothing."""

    def __init__(self, facts: PoolingFacts, device: DeviceThread, torch_device: torch.device) -> None:
        self._facts = facts
        self._device = device
        self._torch_device = torch_device

    @answering_errors
    async def Info(
        self, request: generate_pb.InfoRequest, context: grpc.aio.ServicerContext
    ) -> generate_pb.InfoResponse:
        facts = self._facts
        return generate_pb.InfoResponse(
            protocol=PROTOCOL,
            dtype=facts.dtype,
            device_type=facts.device_type,
            attention_impl=facts.attention_impl,
            quantize=facts.quantize,
            task=facts.task,
            block_size=1,
        )

    @answering_errors
    async def ServiceDiscovery(
        self, request: generate_pb.ServiceDiscoveryRequest, context: grpc.aio.ServicerContext
    ) -> generate_pb.ServiceDiscoveryResponse:
        return generate_pb.ServiceDiscoveryResponse(urls=self._facts.urls)

    @answering_errors
    async def Health(
        self, request: generate_pb.HealthRequest, context: grpc.aio.ServicerContext
    ) -> generate_pb.HealthResponse:
        # Beside the order on purpose: it must answer while a long step runs.
        await asyncio.to_thread(torch.zeros, (2, 2), device=self._torch_device)
        return generate_pb.HealthResponse()

    @answering_errors
    async def ClearCache(
        self, request: generate_pb.ClearCacheRequest, context: grpc.aio.ServicerContext
    ) -> generate_pb.ClearCacheResponse:
        """Begin to count a new router's calls; there is no cache."""
        self._device.reset(request.sequence)
        await asyncio.shield(asyncio.wrap_future(self._device.enqueue(whole(lambda: None), request.sequence)))
        return generate_pb.ClearCacheResponse()
