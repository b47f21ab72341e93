"""Two ways to a fake shard: directly inside the test's loop (fast, fully deterministic), or over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from support.fake_shard import ORDERED_CALLS, FakeShard, ShardFailure

from router.shards.interface import ShardError
from wire.lora.v1 import lora_pb2_grpc
from wire.v3 import generate_pb2_grpc as pb_grpc


class FakeClient:
    """Implements `router.shards.client.Client` without a socket."""

    def __init__(self, shard: FakeShard) -> None:
        self.shard = shard

    def send(self, rpc: Any, request: Any, timeout_s: float | None = None) -> Awaitable[Any]:
        copy = type(request)()
        copy.CopyFrom(request)
        return asyncio.ensure_future(_translated(self.shard.accept(rpc, copy)))

    async def close(self) -> None:
        pass


async def _translated(answer: asyncio.Future[Any]) -> Any:
    try:
        return await asyncio.shield(answer)
    except ShardFailure as failure:
        fatal = failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        raise ShardError(str(failure), fatal=fatal) from failure


class _Servicer(pb_grpc.TextGenerationServiceServicer):  # type: ignore[misc]
    def __init__(self, shard: FakeShard) -> None:
        for rpc in ("Info", "ServiceDiscovery", "Health", *ORDERED_CALLS):
            setattr(self, rpc, _handler(shard, rpc))


def _handler(shard: FakeShard, rpc: str) -> Callable[[Any, Any], Awaitable[Any]]:
    async def handle(request: Any, context: Any) -> Any:
        try:
            return await shard.handle(rpc, request)
        except ShardFailure as failure:
            await context.abort(failure.code, str(failure))

    return handle


@contextlib.asynccontextmanager
async def serve(
    *shards: FakeShard, prefix: str, adapters: Sequence[lora_pb2_grpc.AdaptersServicer] = ()
) -> AsyncIterator[str]:
    """Put shards behind sockets `<prefix>-<rank>`; yields the path of rank 0. adapters: what loads them on each."""
    paths = [f"{prefix}-{rank}" for rank in range(len(shards))]
    servers = []
    for rank, (shard, path) in enumerate(zip(shards, paths, strict=True)):
        shard.urls = tuple(f"unix://{p}" for p in paths)
        server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        )
        pb_grpc.add_TextGenerationServiceServicer_to_server(_Servicer(shard), server)
        if adapters:
            lora_pb2_grpc.add_AdaptersServicer_to_server(adapters[rank], server)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        servers.append(server)
    try:
        yield paths[0]
    finally:
        for server in servers:
            await server.stop(None)
