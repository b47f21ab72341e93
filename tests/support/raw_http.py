"""HTTP by hand, over raw sockets: what no well-behaved client would send, or would not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any


def post(path: str, body: Any, *, last: bool = True, headers: str = "") -> bytes:
    """A whole request; `last` asks the server to close the connection behind its answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n"
    return (head + headers + ("connection: close\r\n" if last else "") + "\r\n").encode() + raw


def generation(tokens: int, inputs: str = "Once upon a time", **parameters: Any) -> dict[str, Any]:
    """The body of a greedy generation of exactly so many tokens."""
    asked = {"max_new_tokens": tokens, "ignore_eos": True, "details": True}
    return {"inputs": inputs, "parameters": asked | parameters}


async def talk(port: int, *pieces: bytes, timeout_s: float = 60.0) -> bytes:
    """Sends the pieces and reads until the server closes; what came before a reset is lost to the caller."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), timeout_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def status_of(answer: bytes) -> int:
    """0 for a connection that was closed without a word."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def json_of(answer: bytes) -> Any:
    """The body of an answer that is not chunked."""
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def deaf_client(port: int, request: bytes) -> socket.socket:
    """Sends a request and never reads; its receive buffer is as small as can be."""
    client = socket.socket()
    with contextlib.suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(request)
    return client
