"""Where gRPC's events are read. In processes of their own: gRPC reads the variable once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os, threading
from wire.rpc.local_grpc import CHANNEL_OPTIONS, poll_in_place
poll_in_place()
import asyncio, grpc, grpc.aio

async def main():
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    async def answer(request, context):
        return request
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    path = os.path.join(os.environ["FOLDER"], "socket")
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    large = bytes(3 * 1024 * 1024)  # more than a stream's window without probes would hold
    async with grpc.aio.insecure_channel(f"unix:{path}", CHANNEL_OPTIONS) as channel:
        assert await channel.unary_unary("/test.Service/Ask")(large) == large
    await server.stop(None)

asyncio.run(main())
print(os.environ["GRPC_EXPERIMENTS"])
"""


@pytest.mark.parametrize(
    ("own", "used"),
    [(None, "-event_engine_client,-event_engine_listener"), ("-event_engine_client", "-event_engine_client")],
)
def test_calls_are_answered_grpc_knows_the_words_and_an_operators_own_are_kept(tmp_path, own, used):
    environ = {**os.environ, "FOLDER": str(tmp_path)}
    environ.pop("GRPC_EXPERIMENTS", None)
    if own is not None:
        environ["GRPC_EXPERIMENTS"] = own
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, used), ended.stderr
    assert "Unknown experiment" not in ended.stderr
