"""Images that cost much: from servers that send tiny chunks, interim answers, many fields or single bytes in records of
TLS, and files of many pixels."""

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
from support.image_answers import IN_SINGLE_BYTES, MANY_FIELDS, drip, head
from support.pictures import picture, saved

_AT_ONCE = 16
_KINDS = ("tiny", "interim", "endless", "sound", "large", "fields", "bytes")
_REASONS = {
    "fields": "the server sends too much besides the file",
    "bytes": "the server sends too little at a time",
}
"""Why each that ends by itself is refused."""


async def image_servers(target: Target, source: random.Random, count: int) -> Counter[str]:
    """So many requests, sixteen at a time; a fifth of them name a picture that is sound."""
    seen: Counter[str] = Counter()
    left = iter(range(count))
    data = base64.b64encode(saved(Image.fromarray(np.zeros((4000, 4000), np.uint8)).convert("1"))).decode()

    async def ask(client: httpx.AsyncClient, own: random.Random) -> None:
        for _ in left:
            kind = own.choice(_KINDS)
            way = own.choice([*{"fields": MANY_FIELDS, "bytes": IN_SINGLE_BYTES}.get(kind, ("file",))])
            is_tls = kind == "bytes" or own.random() < 0.3
            origin = f"s://127.0.0.1:{target.image_tls_port}" if is_tls else f"://127.0.0.1:{target.image_port}"
            url = f"http{origin}/{kind}/{way}/{own.random()}"
            marker = f"![](data:image/png;base64,{data})" if kind == "large" else f"![]({url})"
            asked = {"inputs": marker + "What?", "parameters": {"max_new_tokens": 2}}
            answer = await client.post(own.choice(["/tokenize", "/generate"]), json=asked)
            check(answer)
            assert kind in ("sound", "large") or answer.status_code in (422, 429), (kind, answer.text[:300])
            assert answer.status_code != 422 or _REASONS.get(kind, "") in answer.text, (url, answer.text[:300])
            seen[f"{kind} {answer.status_code}"] += 1

    servers = [
        await asyncio.start_server(_serve, "127.0.0.1", target.image_port),
        await asyncio.start_server(_serve, "127.0.0.1", target.image_tls_port, ssl=target.image_tls),
    ]
    try:
        async with target.client() as client:
            asked = [asyncio.create_task(ask(client, random.Random(source.random()))) for _ in range(_AT_ONCE)]
            await beside(client, asyncio.gather(*asked), seen)
    finally:
        for server in servers:
            server.close()
    return seen


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        _, kind, way, _ = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode().split("/")
        if kind == "sound":
            file = picture(30, 40)
            writer.write(head(200, f"content-length: {len(file)}") + file)
        elif kind == "fields":
            writer.write(MANY_FIELDS[way])
        elif kind == "bytes":
            await drip(writer, IN_SINGLE_BYTES[way])
        else:
            writer.write(b"" if kind == "interim" else head(200, "transfer-encoding: chunked"))
            chunk = b"4000\r\n" + bytes(0x4000) + b"\r\n"
            piece = {"tiny": b"1\r\nx\r\n", "interim": b"HTTP/1.1 100 x\r\n\r\n"}.get(kind, chunk)
            while True:
                writer.write(piece * max(1, 65536 // len(piece)))
                await writer.drain()
                await asyncio.sleep(0)  # over TLS drain does not wait once the other end is gone, nor notices
        await writer.drain()
    writer.close()
