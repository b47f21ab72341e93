"""More tokens than the cache holds: requests grow, yield and go on, and say what each of them says alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.running_server import RunningServer, running_server

pytestmark = pytest.mark.e2e

# A request reserves room for 1024 new tokens at first. Two of these fit at first, and not to their end.
NEW_TOKENS = 1100
CACHE_TOKENS = 16 * 136


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[RunningServer]:
    options = ("--dtype", "float32", "--max-batch-total-tokens", str(CACHE_TOKENS), "--max-total-tokens", "1200")
    with running_server(llama, *options, "--max-input-tokens", "64") as running:
        yield running


def _body(inputs: str, **parameters: Any) -> dict[str, Any]:
    fixed = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "details": True}
    return {"inputs": inputs, "parameters": fixed | parameters}


BODIES = [
    _body("The quick brown fox", repetition_penalty=1.3),
    _body("Numbers: 0 1 2 3", do_sample=True, temperature=0.9, top_p=0.9, seed=42),
]


async def _generate(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, list[int]]:
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    return said["generated_text"], [token["id"] for token in said["details"]["tokens"]]


async def _preemptions(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tgi_request_preempted"))


@pytest.mark.long
async def test_a_request_that_yields_says_what_it_says_alone(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        alone = [await _generate(client, body) for body in BODIES]
        assert all(len(ids) == NEW_TOKENS for _, ids in alone)
        assert await _preemptions(client) == 0
        while await _preemptions(client) == 0:  # on a busy machine one may end before the other begins
            together = await asyncio.gather(*(_generate(client, body) for body in BODIES))
            assert list(together) == alone
