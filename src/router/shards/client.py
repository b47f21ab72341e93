"""One shard over its unix socket, or the endpoint of a node."""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Sequence
from typing import Any, Literal, Protocol

import grpc
import grpc.aio

from router.shards.interface import ShardError
from wire.lora.v1 import lora_pb2_grpc as lora_grpc
from wire.pooling.v1 import pooling_pb2_grpc as pooling_grpc
from wire.rpc import local_grpc, remote_grpc
from wire.rpc.mutual_tls import MutualTls, open_channel
from wire.v3 import generate_pb2_grpc as pb_grpc

Rpc = Literal[
    "Info", "ServiceDiscovery", "ClearCache", "FilterBatch", "Warmup", "Prefill", "Decode", "Health", "LoadAdapter",
    "DropAdapter", "WarmUpPooling", "RunTexts",
]  # fmt: skip

# Prompt logprobs make answers larger than gRPC's default of 4 MiB.
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

LEASE_S = 10.0

# Nothing more can be expected of a shard that answers so: it is gone, or it does not answer at all.
_GONE = {
    grpc.StatusCode.UNAVAILABLE: "the model server cannot be reached",
    grpc.StatusCode.DEADLINE_EXCEEDED: "the model server did not answer in time",
    grpc.StatusCode.CANCELLED: "the model server has stopped",
}


class Client(Protocol):
    """A shard for the pool: send now, answer later."""

    def send(self, rpc: Rpc, request: Any, timeout_s: float | None = None) -> Awaitable[Any]:
        """Send at once; the awaitable raises `ShardError`."""
        ...

    async def close(self) -> None: ...


class ShardClient:
    """A channel to a shard, or a node's endpoint."""

    def __init__(
        self, url: str, token: str | None = None, *, tls: MutualTls | None = None, lease_s: float = LEASE_S
    ) -> None:
        """Take `unix://<path>`, a path, or `tcp://<address>:<port>`, and how long a node may be silent."""
        is_remote = url.startswith(remote_grpc.TCP)
        self.address = url.removeprefix(remote_grpc.TCP).removeprefix(remote_grpc.UNIX)
        tuned = remote_grpc.pinging(lease_s) if is_remote else local_grpc.CHANNEL_OPTIONS
        options = [*_UNLIMITED, *tuned]
        self._channel = open_channel(grpc.aio, remote_grpc.grpc_target(url), tls if is_remote else None, options)
        self._token = remote_grpc.token_metadata(token)
        stub = pb_grpc.TextGenerationServiceStub(self._channel)
        adapters, pooling = lora_grpc.AdaptersStub(self._channel), pooling_grpc.PoolingStub(self._channel)
        self._methods: dict[Rpc, Any] = {
            "Info": stub.Info, "ServiceDiscovery": stub.ServiceDiscovery, "ClearCache": stub.ClearCache,
            "FilterBatch": stub.FilterBatch, "Warmup": stub.Warmup, "Prefill": stub.Prefill, "Decode": stub.Decode,
            "Health": stub.Health, "LoadAdapter": adapters.Load, "DropAdapter": adapters.Drop,
            "WarmUpPooling": pooling.WarmUp, "RunTexts": pooling.Run,
        }  # fmt: skip

    def send(
        self, rpc: Rpc, request: Any, timeout_s: float | None = None, metadata: Sequence[tuple[str, str]] | None = None
    ) -> Awaitable[Any]:
        sent = (*(metadata or ()), *self._token)
        return _Answer(self._methods[rpc](request, timeout=timeout_s, metadata=sent or None), rpc)

    async def close(self) -> None:
        await self._channel.close()


class _Answer:
    """Awaits a call, or not at all; failures are `ShardError`."""

    __slots__ = ("_call", "_rpc")

    def __init__(self, call: Any, rpc: Rpc) -> None:
        self._call = call
        self._rpc = rpc

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self._call.__await__())
        except grpc.aio.AioRpcError as error:
            code = error.code()
            detail = error.details() or code.name
            # With INTERNAL shards answer what callers may read. Other texts are gRPC's own, and may name sockets.
            public = detail if code is grpc.StatusCode.INTERNAL else f"the model server failed ({code.name})"
            raise ShardError(
                _GONE.get(code, public),
                fatal=code in _GONE,
                unreachable=code in _GONE and code is not grpc.StatusCode.DEADLINE_EXCEEDED,
                detail=f"{self._rpc}: {detail}",
            ) from error
