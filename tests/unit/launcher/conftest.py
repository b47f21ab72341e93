"""A launch that must leave no process behind; a scripted server, and a connection to it that is closed in the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from support.scripted_http import ScriptedServer
from unit.launcher.supervised import Launch, Story

from launcher.http_stream import Connection
from launcher.processes.child import Guard
from launcher.processes.signals import Signals


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    logger = logging.getLogger("text_generation_launcher")
    story = Story()
    level = logger.level
    logger.addHandler(story)
    logger.setLevel(logging.DEBUG)
    guard = Guard()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        with Signals() as signals:
            made = Launch(tmp_path, signals, guard, story)
            yield made
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        if made.supervisor is not None:
            made.supervisor.kill_all()
        assert left == [], "a child was left running"
    finally:
        guard.close()
        logger.removeHandler(story)
        logger.setLevel(level)


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
