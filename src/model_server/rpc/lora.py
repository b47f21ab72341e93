"""Loads and drops adapters for the router, beside the steps."""

from __future__ import annotations

import asyncio

import grpc
import torch

from model_server.engine.device_thread import DeviceThread, whole
from model_server.errors import StartupError
from model_server.features.adapters.residents import Residents
from model_server.rpc.interceptor import answering_errors
from wire.lora.v1 import lora_pb2 as pb
from wire.lora.v1 import lora_pb2_grpc as pb_grpc


class LoraServicer(pb_grpc.AdaptersServicer):  # type: ignore[misc]  # generated code has no types
    """One shard's answers."""

    def __init__(self, residents: Residents, device: DeviceThread) -> None:
        """device: what drops wait their turn on."""
        self._residents = residents
        self._device = device

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_AdaptersServicer_to_server(self, server)

    @answering_errors
    async def Load(self, request: pb.LoadRequest, context: grpc.aio.ServicerContext) -> pb.LoadResponse:
        return await asyncio.to_thread(self._load, request)

    @answering_errors
    async def Drop(self, request: pb.DropRequest, context: grpc.aio.ServicerContext) -> pb.DropResponse:
        job = whole(lambda: self._residents.drop(request.id))
        await asyncio.shield(asyncio.wrap_future(self._device.enqueue(job, request.sequence)))
        return pb.DropResponse()

    def _load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        try:
            if request.id:
                size = self._residents.load(request.id, request.name, request.path)
            else:
                size = self._residents.check(request.name, request.path)
        except (torch.OutOfMemoryError, MemoryError):
            return pb.LoadResponse(refused=f"LoRA adapter `{request.name}`: memory is short; try again later")
        except (StartupError, OSError) as error:
            return pb.LoadResponse(refused=" ".join(str(error).split()))
        return pb.LoadResponse(num_bytes=size.num_bytes, rank=size.rank, digest=size.digest)
