"""A span for each gRPC call, below the router's, if there is a collector."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from wire.tracing import Tracing, end

# Durations of a step in its reply, in nanoseconds.
_PHASES = ("concat_ns", "forward_ns", "decode_ns", "total_ns")

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class TracingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Wraps unary methods; streams (reflection) pass."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        return grpc.unary_unary_rpc_method_handler(
            self._traced(handler_call_details.method, handler.unary_unary),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _traced(self, path: str, method: Handler) -> Handler:
        service, _, name = path.strip("/").rpartition("/")

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            sent = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
            span = self._tracing.start(
                path,
                kind="server",
                remote=sent,
                attributes={
                    "rpc.system": "grpc", "rpc.service": service, "rpc.method": name, "net.transport": "unix",
                    "rpc.user_agent": sent.get("user-agent", ""), "rpc.grpc.status_code": 0,
                },
            )  # fmt: skip
            try:
                reply = await method(request, context)
            except BaseException as error:
                span.set_attribute("rpc.grpc.status_code", _code(context))
                end(span, error)
                raise
            for phase in _PHASES:
                if phase in reply.DESCRIPTOR.fields_by_name:
                    span.set_attribute(phase, getattr(reply, phase))
            end(span)
            return reply

        return answer


def _code(context: grpc.aio.ServicerContext) -> int:
    """Return the status that aborted the method, or UNKNOWN."""
    code = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return int(number) if number else int(grpc.StatusCode.UNKNOWN.value[0])
