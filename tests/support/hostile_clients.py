"""Clients that come, ask and leave at moments of their own choice. For the tests, and for hours in `make soak`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct

from support.raw_http import generation, post

_RESET = struct.pack("ii", 1, 0)


async def leave_early(port: int, source: random.Random) -> None:
    """Connects, sends all or a part of some request, perhaps waits a little, and is gone: politely or with a reset."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _request(source)
    writer.write(request[: source.randint(0, len(request))] if source.random() < 0.2 else request)
    await asyncio.sleep(source.choice([0, 0.001, source.uniform(0, 0.3)]))
    if source.random() < 0.5:
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _request(source: random.Random) -> bytes:
    tokens = source.choice([1, 20, 300])
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "n": source.randint(1, 3)}
    grammar = {"type": "regex", "value": f"[a-z]{{{source.randint(1, 30)}}}"}
    inputs = "word " * source.choice([1, 10, 200])
    return source.choice(
        [
            post("/generate", generation(tokens, inputs)),
            post("/generate", generation(tokens, inputs, best_of=2, do_sample=True)),
            post("/generate", generation(tokens, inputs, grammar=grammar)),
            post("/generate_stream", generation(tokens, inputs)),
            post("/v1/chat/completions", chat),
            post("/v1/chat/completions", chat | {"stream": True}),
            post("/v1/completions", {"prompt": ["a", inputs], "max_tokens": tokens, "stream": True}),
            post("/tokenize", {"inputs": inputs}),
        ]
    )
