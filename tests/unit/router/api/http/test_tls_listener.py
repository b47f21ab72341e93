"""TLS connections before, and at the end of their handshake."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable

import pytest
import trustme
from router_fakes import Router, until

from router.api.http.connection import MAX_REFUSED, Bounds

MakeRouter = Callable[..., Router]
BODY = b'{"inputs":"x"}'
HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
GOOD = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and a client's."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


async def ask(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(GOOD)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


async def test_who_has_not_shaken_hands_is_counted(
    router: Router, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    server, client = contexts
    async with router.listening(Bounds(max_connections=2, head_s=600.0), context=server) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 + MAX_REFUSED + 5)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
        while sum(one.done() for one in ended) < 5:
            await asyncio.wait([one for one in ended if not one.done()], return_when=asyncio.FIRST_COMPLETED)
        assert router.num_connections == 2 + MAX_REFUSED
        for _, writer in silent:
            writer.close()
        await until(lambda: router.num_connections == 0)
        assert b"HTTP/1.1 200 OK" in await ask(port, client)
        await asyncio.gather(*ended, return_exceptions=True)
    router.assert_idle()


async def test_who_never_shakes_hands_is_closed(
    router: Router, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async with router.listening(Bounds(head_s=0.2), context=contexts[0]) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        await until(lambda: router.num_connections == 0)


async def test_too_many_connections_are_told_so(
    router: Router, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    server, client = contexts
    async with router.listening(Bounds(max_connections=2), context=server) as port:
        held = [await asyncio.open_connection("127.0.0.1", port, ssl=client) for _ in range(2)]
        await until(lambda: len(router.connections) == 2)
        assert (await ask(port, client)).startswith(b"HTTP/1.1 503 ")
        for _, writer in held:
            writer.close()
        await until(lambda: router.num_connections == 0)


async def test_what_comes_with_the_end_of_the_handshake_is_read(
    router: Router, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    server, client = contexts
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    async with router.listening(context=server) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await asyncio.wait_for(reader.read(1 << 16), 60))
        tls.write(GOOD)
        writer.write(outgoing.read())  # the client's last message of the handshake, and the request
        answer = b""
        while b"generated_text" not in answer:
            incoming.write(await asyncio.wait_for(reader.read(1 << 16), 60))
            with contextlib.suppress(ssl.SSLWantReadError):
                while piece := tls.read(1 << 16):
                    answer += piece
        assert answer.startswith(b"HTTP/1.1 200 OK")
        writer.close()
    router.assert_idle()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 99]
)
async def test_a_server_that_ends_waits_for_no_handshake(
    router: Router, contexts: tuple[ssl.SSLContext, ssl.SSLContext], sent: bytes
) -> None:
    async with asyncio.timeout(30):
        async with router.listening(Bounds(head_s=600.0), context=contexts[0]) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            if sent.startswith(b"GET"):
                await reader.read()
        await until(lambda: router.num_connections == 0)
        writer.close()
