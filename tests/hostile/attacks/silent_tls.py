"""TLS connections that never finish their handshake, or send a request in records of one byte, at a server of their
own: it ends the former, answers the latter, and goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import trustme
from hostile.punctual import ARRIVAL_S, PunctualTransport
from hostile.target import Target
from support.image_answers import drip
from support.raw_http import generation, post, status_of
from support.running_server import RunningServer, running_server

_MOST_CONNECTIONS = 64
_START_LIMIT_S = 120.0
_LIMIT_S = 60.0
_SINGLE_AT_ONCE = 4


async def silent_tls(target: Target, source: random.Random, count: int) -> Counter[str]:
    """Open so many, each with the beginning of a handshake or without a byte, in waves beside an ordinary client."""
    authority = trustme.CA()
    with tempfile.TemporaryDirectory(prefix="tercet-hostile-") as folder:
        certificate = Path(folder) / "server.pem"
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
        environ = {"MAX_CONNECTIONS": str(_MOST_CONNECTIONS), "HEAD_TIMEOUT_SECONDS": str(ARRIVAL_S)}
        with running_server("demo", "--ssl-certfile", str(certificate), environ=environ, wait=False) as server:
            seen = await _attacked(server, authority, source, count)
            assert server.stop() == 0
    return seen


async def _attacked(server: RunningServer, authority: trustme.CA, source: random.Random, count: int) -> Counter[str]:
    deadline = time.monotonic() + _START_LIMIT_S
    while "Ready on https://" not in server.log():
        assert server.process.poll() is None and time.monotonic() < deadline, server.log()[-2000:]
        await asyncio.sleep(0.1)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    hello = _client_hello()
    seen: Counter[str] = Counter()
    while count > 0:
        wave = min(count, source.choice([8, 200]))
        count -= wave
        silent = [_silent(server.port, hello[: source.choice([0, 1, 5, len(hello) // 2])]) for _ in range(wave)]
        ends = asyncio.gather(*silent)
        while not ends.done():
            seen.update([await _ordinary(server.port, context)])
        assert all(await ends), "a silent connection stayed open"
        seen["silent ended"] += wave
        seen.update(await asyncio.gather(*(_single_bytes(server.port, context) for _ in range(_SINGLE_AT_ONCE))))
        assert await _ordinary(server.port, context) == "beside 200", "no client gets in afterwards"
    return seen


async def _ordinary(port: int, context: ssl.SSLContext) -> str:
    """Return what a client sees that comes anew; while all places are taken it may be turned away."""
    transport = PunctualTransport(verify=context)
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", transport=transport, timeout=_LIMIT_S) as client:
        try:
            answer = await client.post("/generate", json=generation(2, "x"))
        except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
            await asyncio.sleep(0.05)
            return "beside no connection"
    assert answer.status_code in (200, 429, 503), answer.text[:500]
    return f"beside {answer.status_code}"


async def _single_bytes(port: int, context: ssl.SSLContext) -> str:
    """Send a request with a record for each byte; return what it is answered. Anew if this machine was too slow."""
    request = post("/generate", generation(2, "x"))
    is_late, answer = True, b""
    while is_late:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            await drip(writer, request)
            is_late = time.monotonic() - began >= ARRIVAL_S
            answer = await asyncio.wait_for(reader.read(), _LIMIT_S)
        except ConnectionError:
            is_late = time.monotonic() - began >= ARRIVAL_S
            assert is_late, "a connection was closed that sent its request in time"
        finally:
            writer.close()
    assert status_of(answer) in (200, 429, 503), answer[:500]
    return f"single bytes {status_of(answer)}"


async def _silent(port: int, beginning: bytes) -> bool:
    """Whether the server ends a connection that says no more than this."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    try:
        writer.write(beginning)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), _LIMIT_S)
        return True
    except TimeoutError:
        return False
    finally:
        writer.close()


def _client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()
