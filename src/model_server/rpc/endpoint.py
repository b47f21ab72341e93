"""The endpoint of a node in a group: its first rank answers the router for all.

It passes each call's bytes to every rank, and answers when all have. Numbers keep one order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from model_server.config import ServeConfig
from model_server.distributed.layout import Layout
from model_server.errors import StartupError
from model_server.rpc.sockets import claim_socket, socket_path
from wire.lora.v1 import lora_pb2
from wire.rpc import local_grpc, remote_grpc
from wire.rpc.fan_out import gathered
from wire.rpc.mutual_tls import MutualTls, open_port
from wire.v3 import generate_pb2 as pb

_SERVICES = (pb.DESCRIPTOR.services_by_name["TextGenerationService"], lora_pb2.DESCRIPTOR.services_by_name["Adapters"])
_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
_TRACE = frozenset({"traceparent", "tracestate"})

Handler = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]


@dataclass(frozen=True, kw_only=True)
class EndpointPlan:
    """What the endpoint needs."""

    # Where it listens.
    url: str
    # Of the node's ranks, in order.
    sockets: tuple[Path, ...]
    # Required of each call, if set.
    token: str | None = None
    tls: MutualTls | None = None


def endpoint_of(config: ServeConfig, layout: Layout) -> EndpointPlan | None:
    """Plan the endpoint of a node's first rank in a group."""
    if config.node_endpoint is None or layout.local.rank != 0:
        return None
    is_remote = not config.node_endpoint.startswith(remote_grpc.UNIX)
    tls = MutualTls.of(config.group_tls_cert, config.group_tls_key, config.group_tls_ca) if is_remote else None
    sockets = tuple(socket_path(config.uds_path, layout.world.rank + other) for other in range(layout.local.size))
    return EndpointPlan(url=config.node_endpoint, sockets=sockets, token=config.group_token, tls=tls)


class Endpoint:
    """Owns server and channels, in a running event loop."""

    def __init__(self, plan: EndpointPlan) -> None:
        self._plan = plan
        self._channels = [
            grpc.aio.insecure_channel(f"unix:{path}", options=[*_UNLIMITED, *local_grpc.CHANNEL_OPTIONS])
            for path in plan.sockets
        ]
        options = [*_UNLIMITED, *remote_grpc.PINGED]
        self._server = grpc.aio.server(interceptors=[_RequireToken(plan.token)], options=options)
        for service in _SERVICES:
            handlers = {
                method.name: grpc.unary_unary_rpc_method_handler(self._passing_on(method)) for method in service.methods
            }
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])

    async def start(self) -> None:
        if self._plan.url.startswith(remote_grpc.UNIX):
            claim_socket(Path(self._plan.url.removeprefix(remote_grpc.UNIX)))
        try:
            open_port(self._server, remote_grpc.grpc_target(self._plan.url), self._plan.tls)
        except RuntimeError:
            raise StartupError(
                f"cannot listen on {self._plan.url} for the router; choose another --shard-port"
            ) from None
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
        for channel in self._channels:
            await channel.close()

    def _passing_on(self, method: Any) -> Handler:
        path = f"/{method.containing_service.full_name}/{method.name}"
        is_nested = "other_ranks" in method.output_type.fields_by_name  # the router needs the answers of every rank
        calls = [channel.unary_unary(path) for channel in self._channels]

        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            trace = tuple((key, value) for key, value in context.invocation_metadata() or () if key in _TRACE)
            # Until every call has been sent nothing is awaited: calls reach each rank in the order of the router.
            sent = [call(request, metadata=trace) for call in calls]
            own: bytes
            try:
                own, *others = await gathered(sent, ends_at=_is_gone)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
                raise AssertionError("abort does not return") from error
            if not others or not is_nested:
                return own
            rest: bytes = pb.OtherRanks(other_ranks=others).SerializeToString()
            return own + rest

        return answer


def _is_gone(error: BaseException) -> bool:
    return not isinstance(error, grpc.aio.AioRpcError) or error.code() in _GONE


class _RequireToken(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without the group's token, before reading messages."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if remote_grpc.is_allowed(handler_call_details.invocation_metadata, self._token):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(requests: object, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of the group is missing or wrong")
