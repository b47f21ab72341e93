"""Requests are asked anew only where the client was late, or met the end of a connection that was there before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from hostile import punctual
from hostile.punctual import PunctualThreadTransport, PunctualTransport

_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"
_GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@asynccontextmanager
async def _says(*answers: bytes) -> AsyncIterator[str]:
    """The URL of a server with these answers, whichever connection asks; an empty one closes it."""
    left: Iterator[bytes] = iter(answers)

    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\nx") and (answer := next(left)):
                writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*filter(None, serving))


async def test_a_408_for_what_was_sent_in_time_is_told() -> None:
    async with _says(_LATE) as url, httpx.AsyncClient(transport=PunctualTransport()) as client:
        assert (await client.post(url, content=b"x")).status_code == 408


async def test_what_was_sent_late_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punctual, "ARRIVAL_S", 0)
    async with _says(_LATE, _LATE, _GOOD) as url, httpx.AsyncClient(transport=PunctualTransport()) as client:
        assert (await client.post(url, content=b"x")).status_code == 200


async def test_threads_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punctual, "ARRIVAL_S", 0)

    def ask(url: str) -> int:
        with httpx.Client(transport=PunctualThreadTransport()) as client:
            return client.post(url, content=b"x").status_code

    async with _says(_LATE, _GOOD) as url:
        assert await asyncio.to_thread(ask, url) == 200


async def test_only_a_kept_connection_may_end_without_an_answer() -> None:
    async with _says(_GOOD, b"", _GOOD, b"") as url, httpx.AsyncClient(transport=PunctualTransport()) as client:
        assert [(await client.post(url, content=b"x")).status_code for _ in range(2)] == [200, 200]
    async with _says(b"", _GOOD) as url, httpx.AsyncClient(transport=PunctualTransport()) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(url, content=b"x")
