"""Server spans: parent from the metadata, status of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.recorded_spans import RecordedSpans, id_of, parent_of

from model_server.rpc.tracing import TracingInterceptor
from wire.v3 import generate_pb2 as pb
from wire.v3 import generate_pb2_grpc as pb_grpc


class Servicer(pb_grpc.TextGenerationServiceServicer):  # type: ignore[misc]
    async def Health(self, request: Any, context: Any) -> Any:
        return pb.HealthResponse()

    async def Decode(self, request: Any, context: Any) -> Any:
        return pb.DecodeResponse(forward_ns=3, decode_ns=2, total_ns=6)

    async def Info(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.INTERNAL, "a secret")


async def test_spans_of_calls(tmp_path: Path) -> None:
    recorded = RecordedSpans()
    server = grpc.aio.server(interceptors=[TracingInterceptor(recorded.tracing)])
    pb_grpc.add_TextGenerationServiceServicer_to_server(Servicer(), server)
    server.add_insecure_port(f"unix:{tmp_path}/x")
    await server.start()
    client = recorded.tracing.start("client", kind="client")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/x") as channel:
        stub = pb_grpc.TextGenerationServiceStub(channel)
        await stub.Health(pb.HealthRequest(), metadata=recorded.tracing.metadata(client))
        await stub.Decode(pb.DecodeRequest())
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Info(pb.InfoRequest())
        assert failed.value.details() == "a secret", "the caller still hears it"
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/generate.v3.TextGenerationService/Nothing")(b"")
    await server.stop(None)
    health, decode, info = recorded.all()
    assert health.name == "/generate.v3.TextGenerationService/Health" and health.kind.name == "SERVER"
    assert parent_of(health) == id_of(client)
    attributes = dict(health.attributes or {})
    assert attributes.pop("rpc.user_agent")
    assert attributes == {
        "rpc.system": "grpc", "rpc.service": "generate.v3.TextGenerationService", "rpc.method": "Health",
        "net.transport": "unix", "rpc.grpc.status_code": 0,
    }  # fmt: skip
    phases = {name: value for name, value in (decode.attributes or {}).items() if name.endswith("_ns")}
    assert phases == {"forward_ns": 3, "decode_ns": 2, "concat_ns": 0, "total_ns": 6}
    assert parent_of(info) == 0 and (info.attributes or {})["rpc.grpc.status_code"] == 13
    assert info.status.status_code.name == "ERROR" and "secret" not in info.to_json()
