"""Clients that come, ask and leave at moments of their own choice, and clients that stay and do not read."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter

from hostile.target import Target
from support.raw_http import deaf_client, generation, post

AT_ONCE = 50
_RESET = struct.pack("ii", 1, 0)


async def leaving_clients(target: Target, source: random.Random, count: int) -> Counter[str]:
    """Connect, ask, leave; two of each fifty are deaf for a while."""
    for _ in range(0, count, AT_ONCE):
        leaving = [leave_early(target.port, source, target.raw_headers) for _ in range(AT_ONCE - 2)]
        await asyncio.gather(*leaving, *(_deaf(target, source) for _ in range(2)))
    return Counter(connections=-(-count // AT_ONCE) * AT_ONCE)


async def leave_early(port: int, source: random.Random, headers: str = "") -> None:
    """Connects, sends all or a part of some request, perhaps waits a little, and is gone: politely or with a reset."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _request(source, headers)
    writer.write(request[: source.randint(0, len(request))] if source.random() < 0.2 else request)
    await asyncio.sleep(source.choice([0, 0.001, source.uniform(0, 0.3)]))
    if source.random() < 0.5:
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _deaf(target: Target, source: random.Random) -> None:
    request = post("/generate_stream", generation(200, top_n_tokens=5), headers=target.raw_headers)
    client = await asyncio.to_thread(deaf_client, target.port, request)
    await asyncio.sleep(source.uniform(0, 0.5))
    client.close()


def _request(source: random.Random, headers: str) -> bytes:
    tokens = source.choice([1, 20, 300])
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "n": source.randint(1, 3)}
    grammar = {"type": "regex", "value": f"[a-z]{{{source.randint(1, 30)}}}"}
    inputs = "word " * source.choice([1, 10, 200])
    path, body = source.choice(
        [
            ("/generate", generation(tokens, inputs)),
            ("/generate", generation(tokens, inputs, best_of=2, do_sample=True)),
            ("/generate", generation(tokens, inputs, grammar=grammar)),
            ("/generate_stream", generation(tokens, inputs)),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", chat | {"stream": True}),
            ("/v1/completions", {"prompt": ["a", inputs], "max_tokens": tokens, "stream": True}),
            ("/tokenize", {"inputs": inputs}),
        ]
    )
    return post(path, body, headers=headers)
