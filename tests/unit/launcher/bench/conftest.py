"""A scripted server, and a connection to it that is closed in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
from support.scripted_http import ScriptedServer

from launcher.bench.http_stream import Connection


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    listening = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield scripted
    listening.close()


@pytest.fixture
def answer() -> Callable[..., bytes]:
    def build(body: bytes, status: str = "200 OK") -> bytes:
        return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    return build


@pytest.fixture
def events() -> Callable[..., bytes]:
    def build(*datas: bytes) -> bytes:
        chunks = [b"data: " + data + b"\n\n" for data in datas]
        body = b"".join(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks) + b"0\r\n\r\n"
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body

    return build


@pytest.fixture
def connection(server: ScriptedServer) -> Iterator[Connection]:
    opened = Connection(server.url, {"x-name": "value"})
    yield opened
    opened.close()
