"""A scheduler with an end, and plain HTTP clients of the server that runs on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

from router_fakes import FakeScheduler

from router.errors import UnhealthyError
from router.events import Event, Failed, Token, TokenGenerated
from router.shards.interface import ShardError

TOKENS: list[Event | None] = [TokenGenerated(Token(1, "a", -1.0))] * 2


class Shards:
    closed = False

    async def close(self) -> None:
        self.closed = True


class EndingScheduler(FakeScheduler):
    """A scheduler with an end: entries that wait get `Failed` when it closes."""

    def __init__(self) -> None:
        super().__init__(lambda request: [*TOKENS, None])
        self.ended = asyncio.Event()
        self.is_closed = False
        self.unreachable: ShardError | None = None

    async def run(self) -> None:
        await self.ended.wait()

    async def end_if_unreachable(self) -> None:
        if self.unreachable is not None:
            self.failure = self.unreachable
            await self.close()

    async def close(self) -> None:
        self.is_closed = True
        for entry in self.open:
            entry.interrupt(Failed(UnhealthyError()))
        self.ended.set()


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)


async def get(port: int, path: str) -> bytes:
    reader, writer = await connect(port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def ask(port: int, path: str) -> bytes:
    """On a connection that the client would keep."""
    reader, writer = await connect(port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def post(port: int, path: str = "/generate") -> bytes:
    reader, writer = await connect(port)
    body = b'{"inputs":"x","prompt":"x"}'
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(f"POST {path} HTTP/1.1\r\n{head}".encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


@contextlib.asynccontextmanager
async def open_stream(port: int) -> AsyncIterator[asyncio.StreamReader]:
    """A stream of which two tokens have come."""
    reader, writer = await connect(port)
    raw = b'{"inputs":"x"}'
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(b"POST /generate_stream HTTP/1.1\r\n" + head.encode() + raw)
    await reader.readuntil(b'"index":2')
    yield reader
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def drains(port: int) -> None:
    """Returns once it does. Each question comes on a connection of its own."""
    while b" 503 " not in await get(port, "/health"):
        pass


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
