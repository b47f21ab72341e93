"""What servers of images send in tests: heads, pieces, and data byte by byte."""

from __future__ import annotations

import asyncio
import contextlib


def head(status: int, *fields: str) -> bytes:
    """Return the head of an answer that ends its connection."""
    return "\r\n".join([f"HTTP/1.1 {status} x", "connection: close", *fields, "", ""]).encode()


def chunked(file: bytes, size: int) -> bytes:
    """Return an answer with a file in chunks of this size."""
    pieces = (file[place : place + size] for place in range(0, len(file), size))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head(200, "transfer-encoding: chunked") + chunks + b"0\r\n\r\n"


IN_SINGLE_BYTES = {
    "head": b"HTTP/1.1 200 x\r\nfield: " + b"a" * 3000,
    "extension": head(200, "transfer-encoding: chunked") + b"1;" + b"a" * 3000 + b"\r\nx\r\n0\r\n\r\n",
}
"""Answers that cost their reader a read of each byte where each is a record of TLS (`drip`)."""

MANY_FIELDS = {
    "short": head(200, *("a: b" for _ in range(20_000))),
    "names": head(200, *(f"name-{number}: b" for number in range(20_000))),
    "empty": head(200, *("a:" for _ in range(20_000))),
}
"""Heads of many small fields."""


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write each byte on its own, over TLS a record each."""
    with contextlib.suppress(OSError):
        for place, byte in enumerate(data):
            writer.write(bytes([byte]))
            if place % 1000 == 0:
                await writer.drain()
        await writer.drain()
