"""Requests that cost a server much and their sender little: ambiguous grammars, chained responses, metadata, heads that
come in pieces. Beside them ordinary requests are answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import httpx
from hostile.answers import check
from hostile.target import Target
from support.expensive_grammars import ambiguous
from support.raw_http import generation, post, status_of, talk

_LIMIT_S = 60.0
"""Of an ordinary request beside an attack: as long as a step may take before the server ends."""


async def expensive_grammars(target: Target, source: random.Random, count: int) -> Counter[str]:
    """So many, four at a time: each is refused, at once or when a mask takes too long, or ends by itself."""
    seen: Counter[str] = Counter()
    left = iter(range(count))

    async def ask(client: httpx.AsyncClient, own: random.Random) -> None:
        for _ in left:
            letters = own.choice(["ab", "a-z", "a-zA-Z "]) + own.choice("01")  # some ask for the same one at once
            text = ambiguous(own.choice([40, 100, 200, 400, 700]), letters, own.choice(["", "Hello ", "x" * 300]))
            body = {"prompt": "x", "max_tokens": own.randint(1, 40), "guided_grammar": text}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code in (200, 400, 429), answer.text[:500]
            if answer.status_code == 400:
                assert "grammar" in answer.text, answer.text[:500]
            seen[f"grammar {answer.status_code}"] += 1

    async with target.client() as client:
        asked = [asyncio.create_task(ask(client, random.Random(source.random()))) for _ in range(4)]
        await beside(client, asyncio.gather(*asked), seen)
    return seen


async def chained_responses(target: Target, source: random.Random, count: int) -> Counter[str]:
    """One conversation that grows with each of so many requests, by reasoning that no prompt has; every eighth brings
    a body full of metadata or tools, or its items many times."""
    seen: Counter[str] = Counter()

    async def chain(client: httpx.AsyncClient) -> None:
        last: str | None = None
        for _ in range(count):
            body = _link(source, last)
            answer = await client.post("/v1/responses", json=body)
            check(answer)
            seen[f"response {answer.status_code}"] += 1
            if answer.status_code == 200:
                last = answer.json()["id"]
                listed = await client.get(f"/v1/responses/{last}/input_items")
                check(listed)
            elif source.random() < 0.2:
                last = None

    async with target.client() as client:
        await beside(client, asyncio.ensure_future(chain(client)), seen)
    return seen


async def split_heads(target: Target, source: random.Random, count: int) -> Counter[str]:
    """An offer of another protocol, cut anywhere, with a request as its body: that request is never answered."""
    inner = post("/generate", generation(2, "x"), last=False, headers=target.raw_headers)
    first = inner

    async def one(own: random.Random) -> str:
        offer = f"upgrade: {own.choice(['websocket', 'h2c', 'x'])}\r\nconnection: upgrade\r\n"
        asked = post("/generate", inner, last=False, headers=target.raw_headers + offer)
        is_second = own.random() < 0.5
        sent = first + asked if is_second else asked
        cut = own.randint(1, len(sent) - 1)
        answers = await talk(target.port, sent[:cut], sent[cut:], timeout_s=_LIMIT_S)
        assert answers.count(b"HTTP/1.1 ") <= 1 + is_second, answers[:1000]
        return f"head {status_of(answers)}"

    sources = [random.Random(source.random()) for _ in range(count)]
    return Counter(await asyncio.gather(*map(one, sources)))


def _link(source: random.Random, last: str | None) -> dict[str, Any]:
    turn = {"role": "user", "content": "x"}
    foreign = {"type": "reasoning", "encrypted_content": "f" * source.randrange(10, 400_000)}
    own = {"type": "reasoning", "content": [{"text": "r" * source.randrange(10, 300)}]}
    body: dict[str, Any] = {"input": [foreign, own, turn], "max_output_tokens": 4, "previous_response_id": last}
    kind = source.randrange(8)
    if kind == 0:
        body["metadata"] = {str(number): "m" * source.choice([10, 2000]) for number in range(source.choice([4, 300]))}
    elif kind == 1:
        tools = range(source.choice([3, 300]))
        body["tools"] = [{"type": "function", "name": f"f{n}", "description": "d" * 1500} for n in tools]
        body["tool_choice"] = "none"
    elif kind == 2:
        inner = [{"type": "function", "name": f"f{n}"} for n in range(source.choice([3, 10_000]))]
        body["tools"] = [{"type": "namespace", "name": "n", "tools": inner}]
        body["stream"] = False
        body["instructions"] = "i" * source.randrange(1, 300)
    return body


async def beside(client: httpx.AsyncClient, attack: asyncio.Future[Any], seen: Counter[str]) -> None:
    """Ordinary requests, one after the other, until the attack is over."""
    longest = 0.0
    while not attack.done():
        began = time.monotonic()
        answer = await client.post("/generate", json=generation(4, "x"))
        longest = max(longest, time.monotonic() - began)
        assert answer.status_code in (200, 429), answer.text[:500]
        assert longest < _LIMIT_S, f"an ordinary request took {longest:.0f} s"
        seen[f"beside {answer.status_code}"] += 1
        health = time.monotonic()
        assert (await client.get("/info")).status_code == 200
        seen["longest /info, ms"] = max(seen["longest /info, ms"], round(1000 * (time.monotonic() - health)))
    seen["longest beside, ms"] = max(seen["longest beside, ms"], round(1000 * longest))
    await attack
