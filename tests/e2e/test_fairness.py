"""Ordinary requests beside many that take seconds each: they do not wait for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.running_server import RunningServer

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"


def generation(inputs: str, **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": {"max_new_tokens": 2, **parameters}}


def dear_grammar(number: int) -> dict[str, Any]:
    numbers = {f"n{i}": {"type": "integer", "multipleOf": 9973 + 100 * number + i} for i in range(50)}
    return {"type": "json", "value": {"type": "object", "properties": numbers}}


LONG = "the quick brown fox jumps over 7 lazy dogs. " * 40_000
MANY = {"messages": [{"role": "user", "content": f"{number} {'x' * 100}"} for number in range(9_000)]}
DEAR = {
    "texts": [("/generate", generation(LONG, truncate=8))] * 6,
    "tokens": [("/tokenize", {"inputs": LONG})] * 6,
    "messages": [(CHAT, MANY)] * 30,
    "grammars": [("/generate", generation("x", grammar=dear_grammar(number))) for number in range(6)],
}


@pytest.mark.parametrize("kind", DEAR)
async def test_ordinary_requests_overtake(server: RunningServer, kind: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        bodies = {id(body): json.dumps(body).encode() for _, body in DEAR[kind]}
        headers = {"content-type": "application/json"}
        dear = [
            asyncio.create_task(client.post(path, content=bodies[id(body)], headers=headers))
            for path, body in DEAR[kind]
        ]
        await asyncio.sleep(0.5)  # for the server to have them
        ordinary = [
            ("/generate", generation("Once upon a time there was a small house near the sea. " * 4)),
            (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}),
            ("/generate", generation("x", grammar={"type": "regex", "value": f"[a-z]{{3}}{kind}"})),
        ]
        for path, body in ordinary:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        assert not all(task.done() for task in dear)
        for task in dear:  # their clients leave, and what has not begun is never done
            task.cancel()
        await asyncio.gather(*dear, return_exceptions=True)
        assert (await client.post("/generate", json=ordinary[0][1])).status_code == 200
