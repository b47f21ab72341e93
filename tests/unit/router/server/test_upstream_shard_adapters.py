"""The whole router before a stand-in for a model server of upstream TGI with LoRA adapters, which it does not name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from serving import connect, terminate
from support.fake_shard import FakeShard
from support.fake_shard_server import serve as serve_shards
from tokenizers import Tokenizer

from router.config import RouterConfig, check
from router.errors import ArgumentValidation
from router.server.server import serve

LISTED = "poems=/adapters/poems@main, org/prose@v1,/adapters/terse,"
PROMPT = "The quick brown fox jumps over the lazy dog"


@asynccontextmanager
async def serving(config: RouterConfig, shard: FakeShard, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serve_shards(shard, prefix=str(folder / "shard")) as path:
        config = replace(
            config, master_shard_uds_path=path, max_input_tokens=1000, max_total_tokens=1100, lora_adapters=LISTED
        )
        server = asyncio.ensure_future(serve(config))
        _, writer = await connect(config.port)
        writer.close()
        async with httpx.AsyncClient(timeout=60, base_url=f"http://127.0.0.1:{config.port}") as client:
            yield client
        terminate()
        assert await asyncio.wait_for(server, 60) == 0
    assert shard.violations == []


async def ask(client: httpx.AsyncClient, adapter: str | None) -> httpx.Response:
    parameters = {"max_new_tokens": 3, "adapter_id": adapter}
    return await client.post("/generate", json={"inputs": PROMPT, "parameters": parameters})


async def test_adapters_are_named_as_their_shards_know_them(
    config: RouterConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Equal prompts share nothing: which adapter made a prefix, such a shard does not tell apart."""
    shard = FakeShard(ours=False, chunking=True, prefix_caching=True, block_size=1)
    shard.cut = lambda request: list(tokenizer.encode(PROMPT, add_special_tokens=request.add_special_tokens).ids)
    named = ["poems", "org/prose", "/adapters/terse"]
    async with serving(config, shard, tmp_path) as client:
        for adapter in (*named, "poems", None):
            answer = await ask(client, adapter)
            assert answer.status_code == 200, answer.text
        unknown = await ask(client, "terse")
        listed = (await client.get("/v1/models")).json()["data"]
    assert unknown.status_code == 422 and "`adapter_id` terse is not known" in unknown.json()["error"]
    assert [model["id"] for model in listed[1:]] == named
    sent = [request.batch.requests[0] for rpc, request in shard.received if rpc == "Prefill"][-5:]
    assert [one.adapter_id for one in sent] == [*named, "poems", ""] and not sent[-1].HasField("adapter_id")
    assert [one.cache_len for one in sent] == [0] * 5


async def test_our_shards_name_theirs(config: RouterConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    shard = FakeShard(chunking=True, prefix_caching=True, block_size=1)
    shard.cut = lambda request: list(tokenizer.encode(PROMPT, add_special_tokens=request.add_special_tokens).ids)
    async with serving(config, shard, tmp_path) as client:
        assert (await ask(client, "poems")).status_code == 422
        for _ in range(2):
            assert (await ask(client, None)).status_code == 200
    sent = [request.batch.requests[0] for rpc, request in shard.received if rpc == "Prefill"]
    assert sent[-1].cache_len > 0


def test_a_list_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ArgumentValidation, match="Invalid LoRA adapter format: a=b=c"):
        check(RouterConfig(lora_adapters="a=b=c"))
