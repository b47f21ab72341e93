"""Images that cost much: from servers that send tiny chunks or interim answers, and files of many pixels."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections import Counter

import httpx
import numpy as np
from hostile.answers import check
from hostile.attacks.expensive import beside
from hostile.target import Target
from PIL import Image
from support.pictures import picture, saved

_AT_ONCE = 16
_HEAD = b"HTTP/1.1 200 x\r\nconnection: close\r\n"


async def image_servers(target: Target, source: random.Random, count: int) -> Counter[str]:
    """So many requests, sixteen at a time; a fifth of them name a picture that is sound."""
    seen: Counter[str] = Counter()
    left = iter(range(count))
    data = base64.b64encode(saved(Image.fromarray(np.zeros((4000, 4000), np.uint8)).convert("1"))).decode()

    async def ask(client: httpx.AsyncClient, own: random.Random) -> None:
        for _ in left:
            kind = own.choice(["tiny", "interim", "endless", "sound", "large"])
            url = f"http://127.0.0.1:{target.image_port}/{kind}/{own.random()}"
            marker = f"![](data:image/png;base64,{data})" if kind == "large" else f"![]({url})"
            asked = {"inputs": marker + "What?", "parameters": {"max_new_tokens": 2}}
            answer = await client.post(own.choice(["/tokenize", "/generate"]), json=asked)
            check(answer)
            assert kind in ("sound", "large") or answer.status_code in (422, 429), (kind, answer.text[:300])
            seen[f"{kind} {answer.status_code}"] += 1

    server = await asyncio.start_server(_serve, "127.0.0.1", target.image_port)
    try:
        async with target.client() as client:
            asked = [asyncio.create_task(ask(client, random.Random(source.random()))) for _ in range(_AT_ONCE)]
            await beside(client, asyncio.gather(*asked), seen)
    finally:
        server.close()
    return seen


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        kind = (await reader.readuntil(b"\r\n\r\n")).split()[1].split(b"/")[1]
        if kind == b"sound":
            file = picture(30, 40)
            writer.write(_HEAD + b"content-length: %d\r\n\r\n" % len(file) + file)
        else:
            writer.write(b"" if kind == b"interim" else _HEAD + b"transfer-encoding: chunked\r\n\r\n")
            chunk = b"4000\r\n" + bytes(0x4000) + b"\r\n"
            piece = {b"tiny": b"1\r\nx\r\n", b"interim": b"HTTP/1.1 100 x\r\n\r\n"}.get(kind, chunk)
            while True:
                writer.write(piece * max(1, 65536 // len(piece)))
                await writer.drain()
        await writer.drain()
    writer.close()
