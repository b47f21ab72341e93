"""Prompts with pictures that yield for lack of cache: each goes on with its own, and no picture is encoded again."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import httpx
import pytest
from support.metrics_text import metrics_of
from support.pictures import picture
from support.running_server import RunningServer, running_server
from support.vision_models import write_vision_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]

# As in test_preemption: two of these fit at first, and not to their end.
NEW_TOKENS = 1100
CACHE_TOKENS = 16 * 140
SEEDS = (1, 2, 3)
HELD = ("tgi_batch_current_size", "tgi_queue_size", "tgi_kv_blocks_live")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Pictures are read in steps of 16 tokens, and their positions are not those of their tokens. Nothing is shared, so
    a request that goes on reads its picture again."""
    folder = tmp_path_factory.mktemp("qwen2_vl")
    write_vision_checkpoint(folder, "qwen2_vl")
    options = (
        "--dtype", "float32", "--max-batch-total-tokens", str(CACHE_TOKENS), "--max-total-tokens", "1250",
        "--max-input-tokens", "140", "--max-step-prefill-tokens", "16",
    )  # fmt: skip
    with running_server(folder, *options, environ={"PREFIX_CACHING": "0"}) as running:
        yield running


async def generated(client: httpx.AsyncClient, seed: int) -> list[int]:
    """Tokens for a prompt with a picture."""
    shown = f"![](data:image/png;base64,{base64.b64encode(picture(60, 80, seed)).decode()})"
    parameters = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "details": True, "repetition_penalty": 1.3}
    answer = await client.post("/generate", json={"inputs": f"See {shown} here", "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["details"]["tokens"]]


async def test_a_request_that_yields_keeps_its_picture(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:

        async def metrics() -> dict[str, float]:
            return metrics_of((await client.get("/metrics")).text)

        async def num_preempted() -> float:
            return sum(value for name, value in (await metrics()).items() if name.startswith("tgi_request_preempted"))

        alone = [await generated(client, seed) for seed in SEEDS]
        assert len({tuple(tokens) for tokens in alone}) == len(SEEDS) and await num_preempted() == 0
        assert all(len(tokens) == NEW_TOKENS for tokens in alone)
        rounds = 0
        while await num_preempted() == 0:  # on a busy machine one may end before the others begin
            rounds += 1
            together = await asyncio.gather(*(generated(client, seed) for seed in SEEDS))
            assert list(together) == alone
        found = await metrics()
        assert found["tgi_encoder_cache_misses"] == len(SEEDS)
        assert found["tgi_encoder_cache_hits"] > rounds * len(SEEDS)
        while any(found[name] for name in HELD):
            await asyncio.sleep(0.05)
            found = await metrics()
