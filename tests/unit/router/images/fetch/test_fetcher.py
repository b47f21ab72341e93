"""Fetching from servers of a test, friendly and hostile ones."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trustme
from support.image_answers import IN_SINGLE_BYTES, MANY_FIELDS, chunked, drip, head

from router.errors import OverloadedError, ValidationError
from router.images.fetch.bounded_stream import client_context
from router.images.fetch.fetcher import UrlFetcher

FILE = b"the bytes of a file"


class Server:
    """Answers by path on a port of 127.0.0.1, and remembers the heads of the requests."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.port = 0
        self.answers: dict[str, bytes] = {"/file": head(200, f"content-length: {len(FILE)}") + FILE}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(asked)
            path = asked.split()[1]
            if path == "/silent":
                await asyncio.sleep(60)
            elif path == "/slow":
                writer.write(head(200))
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            elif path == "/endless":
                writer.write(head(200))
                while True:
                    writer.write(bytes(10_000))
                    await writer.drain()
            elif path in ("/interim", "/interim-file"):
                for _ in range(1000 if path == "/interim-file" else 1_000_000):
                    writer.write(b"HTTP/1.1 100 x\r\n\r\n")
                    await writer.drain()
                writer.write(self.answers["/file"])
            else:
                writer.write(self.answers.get(path, head(404)))
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    one = Server()
    listening = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.port = listening.sockets[0].getsockname()[1]
    yield one
    listening.close()


async def local(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def fetcher(**options: Any) -> UrlFetcher:
    return UrlFetcher(**({"mode": "all", "limit_s": 30, "resolve": local} | options))


async def refusal(one: UrlFetcher, url: str, max_bytes: int = 100_000) -> str:
    with pytest.raises(ValidationError) as caught:
        await one.fetch(url, max_bytes)
    return str(caught.value).removeprefix("Input validation error: ")


async def test_a_file_is_asked_for_by_its_name_at_the_address_that_was_checked(server: Server) -> None:
    url = f"http://pictures.example:{server.port}/file"
    assert await fetcher().fetch(url, 100) == FILE
    (asked,) = server.heads
    assert asked.startswith("GET /file HTTP/1.1\r\n")
    assert f"host: pictures.example:{server.port}\r\n" in asked.lower()
    assert "accept-encoding: identity\r\n" in asked.lower() and "cookie" not in asked.lower()


async def test_a_name_is_resolved_once(server: Server) -> None:
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])

    async def resolve(host: str, port: int) -> list[str]:
        return next(answers)

    assert await fetcher(resolve=resolve).fetch(f"http://x:{server.port}/file", 100) == FILE


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "0", "2130706433", "0177.0.0.1", "0x7f.1", "localhost",
             "169.254.169.254"],
)  # fmt: skip
async def test_private_addresses_in_any_form(host: str, server: Server) -> None:
    one = fetcher(mode="public", resolve=None)
    assert await refusal(one, f"http://{host}:{server.port}/file") in (
        "Could not fetch image: address not allowed",
        "Could not fetch image: connection failed",  # a form that the system's resolver does not know
    )
    assert server.heads == []


@pytest.mark.parametrize(
    "url",
    ["http://user@x/", "http://a:b@x/", "http://x\\@y/", "file:///etc/passwd", "http:///x", "http://x:99999/",
     "http://x/ y", "http://x/\x00", "http://ü/", "ftp://x/", "http://[::1/", "gopher://x"],
)  # fmt: skip
async def test_urls_that_are_not_valid(url: str) -> None:
    assert await refusal(fetcher(), url) == "Could not fetch image: the URL is not valid"


async def test_redirects_are_checked_anew(server: Server) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return {"public": ["127.0.0.1"], "metadata": ["169.254.169.254"]}[host]

    base = f"http://public:{server.port}"
    server.answers |= {
        "/once": head(302, "location: /file"),
        "/twice": head(301, f"location: {base}/once"),
        "/thrice": head(307, "location: /twice"),
        "/loop": head(302, "location: /loop"),
        "/private": head(302, "location: http://metadata/latest"),
        "/other": head(302, "location: file:///etc/passwd"),
        "/nowhere": head(302),
    }
    listed = UrlFetcher(mode="public", limit_s=30, hosts=[f"public:{server.port}"], resolve=resolve)
    assert await listed.fetch(f"{base}/once", 100) == FILE
    assert await listed.fetch(f"{base}/twice", 100) == FILE
    assert await refusal(listed, f"{base}/thrice") == "Could not fetch image: too many redirects"
    assert await refusal(listed, f"{base}/loop") == "Could not fetch image: too many redirects"
    assert await refusal(listed, f"{base}/private") == "Could not fetch image: host not allowed"
    assert await refusal(listed, f"{base}/other") == "Could not fetch image: the URL is not valid"
    assert await refusal(listed, f"{base}/nowhere") == "Could not fetch image: a redirect without a target"


async def test_a_redirect_to_a_private_address_of_an_open_list(server: Server) -> None:
    """The first address is taken for a public one."""

    async def resolve(host: str, port: int) -> list[str]:
        return {"public": ["127.0.0.1"], "metadata": ["169.254.169.254"]}[host]

    server.answers["/private"] = head(302, "location: http://metadata/latest")
    one = fetcher(mode="public", resolve=resolve)
    one._pool._network_backend._may_be_private = lambda host, port: host == "public"  # type: ignore[attr-defined]
    assert await refusal(one, f"http://public:{server.port}/private") == "Could not fetch image: address not allowed"


async def test_hosts_that_are_listed_may_be_private_and_are_the_only_ones(server: Server) -> None:
    for listed in ("pictures", f"pictures:{server.port}", "Pictures.", f"pictures.:{server.port}"):
        one = fetcher(mode="public", hosts=[listed])
        assert await one.fetch(f"http://PICTURES:{server.port}/file", 100) == FILE
        assert await one.fetch(f"http://pictures.:{server.port}/file", 100) == FILE
        assert await refusal(one, f"http://x:{server.port}/file") == "Could not fetch image: host not allowed"
    one = fetcher(hosts=["pictures:1"])
    assert await refusal(one, f"http://pictures:{server.port}/file") == "Could not fetch image: host not allowed"


async def test_statuses_and_answers_that_are_refused(server: Server) -> None:
    server.answers |= {
        "/gone": head(410) + b"secret",
        "/gzip": head(200, "content-encoding: gzip") + b"x",
        "/large": head(200, "content-length: 200000"),
        "/short": head(200, "content-length: 100") + b"x",
        "/smtp": b"220 mail\r\n",
    }
    base = f"http://x:{server.port}"
    assert await refusal(fetcher(), f"{base}/gone") == "Could not fetch image: status 410"
    assert await refusal(fetcher(), f"{base}/gzip") == "Could not fetch image: the file is compressed"
    too_large = "Image size 200000 bytes exceeds maximum allowed size of 100000 bytes"
    assert await refusal(fetcher(), f"{base}/large") == too_large
    assert await refusal(fetcher(), f"{base}/short") == "Failed to read image data: it ended too early"
    assert "Could not fetch image" in await refusal(fetcher(), f"{base}/smtp")
    assert "exceeds maximum allowed size" in await refusal(fetcher(), f"{base}/endless")


@pytest.mark.parametrize("path", ["/silent", "/slow"])
async def test_a_slow_server_has_a_limit(path: str, server: Server) -> None:
    one = fetcher(limit_s=0.3)
    assert await refusal(one, f"http://x:{server.port}{path}") == "Could not fetch image: timed out"


async def test_slow_files_of_a_host_hold_up_no_other_host(server: Server) -> None:
    """And what waits for a place is not called slow."""
    one = fetcher(wait_s=0.05)
    names = ("slow", "slow.") * 4  # a host by two names
    slow = [asyncio.create_task(one.fetch(f"http://{name}:{server.port}/silent", 100)) for name in names]
    while len(server.heads) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await one.fetch(f"http://other:{server.port}/file", 100) == FILE
    refused = await asyncio.gather(*slow[4:], return_exceptions=True)
    assert [type(error) for error in refused] == [OverloadedError] * 4
    for task in slow[:4]:
        task.cancel()
    await asyncio.gather(*slow[:4], return_exceptions=True)
    assert not one._places._hosts


async def test_a_port_that_is_closed() -> None:
    assert await refusal(fetcher(), "http://x:1/") == "Could not fetch image: connection failed"


async def test_certificates_are_for_the_name_and_https_never_becomes_http() -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("pictures.example").configure_cert(context)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    one = Server()
    one.answers["/down"] = head(302, "location: http://pictures.example/file")
    listening = await asyncio.start_server(one.serve, "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    try:
        trusting = fetcher(ssl_context=trusted)
        assert await trusting.fetch(f"https://pictures.example:{port}/file", 100) == FILE
        down = await refusal(trusting, f"https://pictures.example:{port}/down")
        assert down == "Could not fetch image: a redirect from https to http"
        assert (
            await refusal(trusting, f"https://other.example:{port}/file") == "Could not fetch image: connection failed"
        )
        assert (
            await refusal(fetcher(), f"https://pictures.example:{port}/file")
            == "Could not fetch image: connection failed"
        )
    finally:
        listening.close()


async def test_pieces_of_one_byte_are_refused(server: Server) -> None:
    server.answers["/tiny"] = chunked(bytes(50_000), 1)
    server.answers["/small"] = chunked(FILE * 2000, 512)
    base = f"http://x:{server.port}"
    assert (
        await refusal(fetcher(), f"{base}/tiny") == "Could not fetch image: the file comes in pieces that are too small"
    )
    assert await fetcher().fetch(f"{base}/small", 100_000) == FILE * 2000


async def test_single_bytes_are_refused_in_records_of_tls_and_in_what_surrounds_a_piece() -> None:
    """Each is a read of its own, however much lies in the machine's buffer."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("x").configure_cert(context)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        await drip(writer, IN_SINGLE_BYTES[path.removeprefix("/")])
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as listening:
        port = listening.sockets[0].getsockname()[1]
        for path in IN_SINGLE_BYTES:
            said = await refusal(fetcher(ssl_context=trusted), f"https://x:{port}/{path}")
            assert said == "Could not fetch image: the server sends too little at a time"


@pytest.mark.parametrize("kind", MANY_FIELDS)
async def test_a_head_of_many_fields_is_refused(kind: str, server: Server) -> None:
    server.answers["/fields"] = MANY_FIELDS[kind]
    said = await refusal(fetcher(), f"http://x:{server.port}/fields")
    assert said == "Could not fetch image: the server sends too much besides the file"


def test_no_server_chooses_the_numbers_of_a_key_exchange() -> None:
    context = client_context()
    assert all(cipher["kea"] in ("kx-ecdhe", "kx-any") for cipher in context.get_ciphers())
    assert context.options & ssl.OP_NO_RENEGOTIATION


async def test_interim_answers_without_an_end(server: Server) -> None:
    base = f"http://x:{server.port}"
    assert await fetcher().fetch(f"{base}/interim-file", 1000) == FILE
    said = await refusal(fetcher(), f"{base}/interim")
    assert said == "Could not fetch image: the server sends too much besides the file"
