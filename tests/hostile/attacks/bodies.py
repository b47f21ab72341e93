"""Random bodies on every route: served or refused, each with one whole answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
from hostile.answers import check
from hostile.random_bodies import random_request
from hostile.target import Target

AT_ONCE = 32  # fewer than there are permits, so that most are looked at and not turned away
_JSON = {"content-type": "application/json"}


async def random_bodies(target: Target, source: random.Random, count: int) -> Counter[str]:
    """One in fifty comes without a key."""
    statuses: Counter[str] = Counter()
    left = iter(range(count))

    async def ask(client: httpx.AsyncClient, own: random.Random) -> None:
        for _ in left:
            path, raw = random_request(own)
            is_stranger = own.random() < 0.02
            headers = _JSON | ({"authorization": "Bearer wrong"} if is_stranger else {})
            answer = await asked(client, path, raw, headers)
            statuses[str(answer.status_code)] += 1
            try:
                if is_stranger:
                    assert answer.status_code == 401
                else:
                    check(answer)
            except Exception as error:
                raise AssertionError(f"{path} {raw!r}: {error}") from error

    async with target.client() as client:
        await asyncio.gather(*(ask(client, random.Random(source.random())) for _ in range(AT_ONCE)))
    return statuses


async def asked(client: httpx.AsyncClient, path: str, raw: bytes, headers: dict[str, str]) -> httpx.Response:
    """The answer; a connection that was closed while a busy machine let the client wait is tried once more."""
    try:
        return await client.post(path, content=raw, headers=headers)
    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
        return await client.post(path, content=raw, headers=headers)
