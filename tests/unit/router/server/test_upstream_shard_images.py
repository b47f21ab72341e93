"""The whole router before a stand-in for a model server of upstream TGI that reads images: chunks, slots, answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import connect, terminate
from support.fake_shard import FakeShard
from support.fake_shard_server import serve as serve_shards
from support.pictures import picture
from support.upstream_prompts import UpstreamPrompts
from support.vision_settings import settings_folder
from tokenizers import AddedToken, Tokenizer

from router.config import RouterConfig
from router.server.server import serve

MARKS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")


class Scene:
    def __init__(self, port: int, shard: FakeShard) -> None:
        self.url, self.shard = f"http://127.0.0.1:{port}", shard

    async def post(self, path: str, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            return await client.post(self.url + path, json=body)


@pytest.fixture
async def scene(config: RouterConfig, model: Path, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Scene]:
    with_image = Tokenizer.from_str(tokenizer.to_str())
    with_image.add_special_tokens([AddedToken(one, special=True) for one in MARKS])
    with_image.save(str(model / "tokenizer.json"))
    settings_folder(model, "qwen2_vl")
    shard = FakeShard(ours=False, chunking=True, prefix_caching=True, block_size=1)
    shard.cut = UpstreamPrompts(model, with_image).cut
    async with serve_shards(shard, prefix=str(tmp_path / "shard")) as path:
        config = replace(config, master_shard_uds_path=path, max_input_tokens=1000, max_total_tokens=1100)
        serving = asyncio.ensure_future(serve(config))
        _, writer = await connect(config.port)
        writer.close()
        yield Scene(config.port, shard)
        terminate()
        assert await asyncio.wait_for(serving, 60) == 0
    assert shard.violations == []


async def test_prompts_with_images(scene: Scene) -> None:
    """Two equal prompts share nothing: token ids do not tell images apart."""
    files = [picture(112, 140, seed) for seed in (0, 1)]
    markers = [f"![](data:image/png;base64,{base64.b64encode(one).decode()})" for one in files]
    answers = []
    for marker in (markers[0], markers[1], markers[0]):
        answer = await scene.post("/generate", inputs=f"The {marker} fox", parameters={"max_new_tokens": 4})
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["generated_text"])
    prefills = [request for rpc, request in scene.shard.received if rpc == "Prefill"]
    sent = [request.batch.requests[0] for request in prefills][-3:]
    assert [one.cache_len for one in sent] == [0, 0, 0]
    assert [one.input_chunks.chunks[1].image.data for one in sent] == [files[0], files[1], files[0]]
    text = await scene.post("/generate", inputs="The quick fox", parameters={"max_new_tokens": 4})
    assert text.status_code == 200

    streamed = await scene.post("/generate_stream", inputs=markers[0], parameters={"max_new_tokens": 3})
    events = [json.loads(line[5:]) for line in streamed.text.splitlines() if line.startswith("data:")]
    assert [event["token"]["text"] for event in events] == [f" r{sent[-1].id + 2}{n}" for n in (1, 2, 3)]


async def test_refusals_reach_no_shard(scene: Scene) -> None:
    bad = base64.b64encode(picture(20, 20)[:-40]).decode()
    for inputs, said in (
        (f"The ![](data:image/png;base64,{bad})", "invalid image: the file is damaged"),
        ("The <|image_pad|> fox", "stands for an image"),
        (f"![](data:image/png;base64,{base64.b64encode(picture(1200, 1400, format='JPEG')).decode()})", "must be <="),
    ):
        answer = await scene.post("/generate", inputs=inputs, parameters={"max_new_tokens": 4})
        assert answer.status_code == 422 and said in answer.json()["error"], answer.text
    assert not [rpc for rpc, _ in scene.shard.received if rpc == "Prefill"]
