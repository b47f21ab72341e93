"""Requests for adapters that came while the server runs, and that yield for lack of cache: each keeps its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.adapters import write_adapter
from support.metrics_text import metrics_of
from support.running_server import RunningServer, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# As in test_preemption: two of these fit at first, and not to their end.
NEW_TOKENS = 1100
CACHE_TOKENS = 16 * 136
TARGETS = {f"model.layers.{layer}.self_attn.{name}": (64, 64) for layer in range(4) for name in ("q_proj", "o_proj")}
NAMES = ("poems", "prose", None)


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("root")
    for seed, name in enumerate(NAMES[:2]):
        write_adapter(root / str(name), TARGETS, seed=seed)
    cache = ("--max-batch-total-tokens", str(CACHE_TOKENS), "--max-total-tokens", "1200", "--max-input-tokens", "64")
    adapters = ("--lora-root", str(root), "--api-key", "secret")
    with running_server(llama, "--dtype", "float32", *cache, *adapters) as running:
        yield running


async def generated(client: httpx.AsyncClient, adapter: str | None) -> list[int]:
    parameters = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "details": True, "adapter_id": adapter}
    answer = await client.post("/generate", json={"inputs": "The quick brown fox", "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["details"]["tokens"]]


async def test_a_request_that_yields_keeps_its_adapter(server: RunningServer) -> None:
    headers = {"authorization": "Bearer secret"}
    async with httpx.AsyncClient(base_url=server.url, timeout=240, headers=headers) as client:

        async def num_preempted() -> float:
            found = metrics_of((await client.get("/metrics")).text)
            return sum(value for name, value in found.items() if name.startswith("tgi_request_preempted"))

        alone = [await generated(client, name) for name in NAMES]
        assert len({tuple(tokens) for tokens in alone}) == len(NAMES) and await num_preempted() == 0
        while await num_preempted() == 0:  # on a busy machine one may end before the others begin
            together = await asyncio.gather(*(generated(client, name) for name in NAMES))
            assert list(together) == alone
