"""Sends a request of a batch to the application itself, past its sockets."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from router.tracing import BATCH_OWNER

_HOST = b"localhost"


@dataclass(frozen=True)
class Answer:
    """What a client would have got."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None


async def ask(app: ASGIApp, path: str, body: bytes, owner: str) -> Answer:
    """Ask as a client with the API key of this name. Raises whatever the application does."""
    is_read = False
    gone = asyncio.Event()
    status = 500
    headers: dict[bytes, bytes] = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await gone.wait()  # this client stays until it has its answer
            return {"type": "http.disconnect"}
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(_scope(path, len(body), owner), receive, send)
    wait_s = None
    with suppress(KeyError, ValueError):
        wait_s = float(headers[b"retry-after"])
    return Answer(status, b"".join(parts), headers.get(b"x-request-id", b"").decode("latin-1"), wait_s)


def _scope(path: str, size: int, owner: str) -> Scope:
    head = [(b"host", _HOST), (b"content-type", b"application/json"), (b"content-length", b"%d" % size)]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": head,
        "client": None,
        "server": None,
        "state": {},
        BATCH_OWNER: owner,
    }
