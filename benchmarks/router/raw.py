"""What the machine and the libraries give at best: a bare gRPC call, a bare event through uvicorn.

`grpc` serves an answer of the size of a step's; `sse` writes events of the size of a token's, on as many connections as
come, without routes, schemas or a scheduler behind it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
import uvicorn
import uvloop

from benchmarks.router.child import Handler, run_child

_METHOD = "/raw/Call"
_EVENT = (
    b'data: {"index":1000,"token":{"id":1000,"text":" token","logprob":-1.2345678,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
)


async def grpc_server() -> Mapping[str, Handler]:
    async def answer(request: bytes, context: Any) -> bytes:
        return b"x" * 64

    server = grpc.aio.server()
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
    server.add_insecure_port(f"unix:{sys.argv[2]}")
    await server.start()
    return {"stop": server.stop}  # holds the server, which ends when nobody does


def measure_grpc(path: str, seconds: float) -> dict[str, float]:
    """Round trips one after another, and with two in flight; CPU of the calling side."""
    return uvloop.run(_measure_grpc(path, seconds))


async def _measure_grpc(path: str, seconds: float) -> dict[str, float]:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call = channel.unary_unary(_METHOD)
        await call(b"warm up")

        async def one_after_another(until: float) -> int:
            number = 0
            while time.monotonic() < until:
                await call(b"x" * 16)
                number += 1
            return number

        started, cpu = time.monotonic(), time.process_time()
        number = await one_after_another(started + seconds)
        lone_s, cpu = (time.monotonic() - started) / number, time.process_time() - cpu
        started = time.monotonic()
        both = await asyncio.gather(*(one_after_another(started + seconds) for _ in range(2)))
        rate = sum(both) / (time.monotonic() - started)
    return {"round_trip_us": lone_s * 1e6, "client_cpu_us": cpu / number * 1e6, "two_in_flight_per_s": rate}


async def sse_server() -> Mapping[str, Handler]:
    config = uvicorn.Config(_app, port=int(sys.argv[2]), log_level="warning", lifespan="off", http="httptools")
    server = uvicorn.Server(config)
    task = asyncio.get_running_loop().create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn offers nothing to wait for
        await asyncio.sleep(0.01)
    return {"stop": task.cancel}


async def _app(scope: Any, receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """Endless events; every connection yields to the others after each."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while True:
        await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
        await asyncio.sleep(0)


if __name__ == "__main__":
    run_child({"grpc": grpc_server, "sse": sse_server}[sys.argv[1]])
