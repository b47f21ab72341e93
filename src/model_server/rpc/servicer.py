"""RPC method to engine call: the gRPC loop converts and waits, so Health always answers.

A call takes its turn by number at once; helper threads read its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TypeVar

import grpc

from model_server.batch.results import StepResult
from model_server.batch.sequence import NewRequest
from model_server.engine.device_thread import DeviceThread, Job, whole
from model_server.engine.engine import Engine
from model_server.engine.warm_up import Capacity, WarmupRequest
from model_server.errors import RequestError
from model_server.rpc import convert
from model_server.rpc.interceptor import answering_errors
from wire.processes.shared_memory import process_namespace
from wire.protocol import PROTOCOL
from wire.v3 import generate_pb2 as pb
from wire.v3 import generate_pb2_grpc as pb_grpc

T = TypeVar("T")

# One Decode runs while the next one waits in the queue of the device thread, so that the device never waits.
_PIPELINE_DEPTH = 2


@dataclass(frozen=True, kw_only=True)
class ShardFacts:
    """What Info and ServiceDiscovery answer."""

    dtype: str
    device_type: str
    attention_impl: str
    block_size: int
    chunking: bool
    prefix_caching: bool
    grows: bool
    urls: tuple[str, ...]
    kv_cache_dtype: str
    quantize: str | None
    adapters: tuple[str, ...] = ()
    speculate: int = 0
    speculator: str | None = None
    micro_batches: int = 1
    images: bool = False
    loads_adapters: bool = False
    adapter_slots: int | None = None
    image_reserve: int = 0
    state_slots: int = 0
    state_bytes: int = 0
    state_grid: int = 0
    decoder_prefix: int = 0


# Those that have the same name in Info.
_FACTS_BY_NAME = tuple(one.name for one in fields(ShardFacts) if one.name not in ("chunking", "urls"))


class Servicer(pb_grpc.TextGenerationServiceServicer):  # type: ignore[misc]  # generated code has no types
    """One shard's answers."""

    def __init__(
        self,
        engine: Engine,
        device: DeviceThread,
        facts: ShardFacts,
        warm_up: Callable[[WarmupRequest], Capacity],
    ) -> None:
        self._engine = engine
        self._device = device
        self._facts = facts
        self._warm_up = warm_up
        self._preparing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")

    @answering_errors
    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.InfoResponse:
        facts = self._facts
        return pb.InfoResponse(
            protocol=PROTOCOL,
            pipeline_depth=_PIPELINE_DEPTH,
            support_chunking=facts.chunking,
            process_namespace=process_namespace() if facts.images else None,
            **{name: getattr(facts, name) for name in _FACTS_BY_NAME},
        )

    @answering_errors
    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self._facts.urls)

    @answering_errors
    async def Health(self, request: pb.HealthRequest, context: grpc.aio.ServicerContext) -> pb.HealthResponse:
        # Beside the order on purpose: it must answer while a long step runs.
        await asyncio.to_thread(self._engine.health)
        return pb.HealthResponse()

    @answering_errors
    async def ClearCache(
        self, request: pb.ClearCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.ClearCacheResponse:
        batch_id = request.id if request.HasField("id") else None
        if batch_id is None:
            self._device.reset(request.sequence)
        await self._run(whole(lambda: self._engine.clear(batch_id)), request.sequence)
        return pb.ClearCacheResponse()

    @answering_errors
    async def FilterBatch(
        self, request: pb.FilterBatchRequest, context: grpc.aio.ServicerContext
    ) -> pb.FilterBatchResponse:
        kept = list(request.request_ids)
        batch = await self._run(whole(lambda: self._engine.filter(request.batch_id, kept)), request.sequence)
        return pb.FilterBatchResponse(batch=convert.cached_batch_to(batch) if batch is not None else None)

    @answering_errors
    async def Warmup(self, request: pb.WarmupRequest, context: grpc.aio.ServicerContext) -> pb.WarmupResponse:
        job = whole(lambda: self._warm_up(convert.warmup_from(request)))
        capacity = await self._run(job, request.sequence)
        return convert.capacity_to(capacity)

    @answering_errors
    async def Prefill(self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext) -> pb.PrefillResponse:
        # Even a request that cannot be read takes its turn in the order: a number left out would stop the shard.
        prepared = self._preparing.submit(self._prepare, request)
        call = convert.prefill_from(request)

        def submit() -> Callable[[], StepResult]:
            try:
                requests = prepared.result()
            except BaseException:
                if call.cached_id is not None and self._facts.chunking:
                    self._engine.lose(call.cached_id)  # its step has not run, and no other call will make up for it
                raise
            return self._engine.submit_prefill(call, requests)

        def overlaps() -> bool:
            # What cannot be read fails when its turn comes, and then nothing may be in flight.
            is_ready = prepared.done() and prepared.exception() is None
            return is_ready and self._engine.may_overlap(call)

        job = Job(submit, overlaps=overlaps, is_over=self._engine.is_over)
        result = await self._run(job, call.sequence)
        return convert.prefill_response(result)

    @answering_errors
    async def Decode(self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext) -> pb.DecodeResponse:
        call = convert.decode_from(request)
        job = Job(
            lambda: self._engine.submit_decode(call),
            overlaps=lambda: self._engine.may_overlap(call),
            is_over=self._engine.is_over,
        )
        result = await self._run(job, call.sequence)
        return convert.decode_response(result)

    async def _run(self, job: Job[T], sequence: int) -> T:
        # Shielded: a router that gives up on a call must not cancel the work, other ranks run it too.
        return await asyncio.shield(asyncio.wrap_future(self._device.enqueue(job, sequence)))

    def _prepare(self, request: pb.PrefillRequest) -> list[NewRequest]:
        if request.HasField("cached_id") and not self._facts.chunking:
            raise RequestError("this shard does not chunk prefills, as its Info says: no cached_id in Prefill")
        requests = convert.requests_from(request.batch)
        self._engine.compile_grammars(requests)
        return requests
