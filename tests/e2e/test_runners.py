"""Models that the native decoder does not know, through the real server: greedy tokens equal transformers' own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.running_server import RunningServer, running_server
from support.tiny_models import VOCAB_SIZE, write_tokenizer
from support.tiny_types import type_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# Model type, the runner that must serve it; without a layer that caches keys, too.
SERVED = (("olmo", "transformers"), ("rwkv", "stateful"), ("t5", "transformers"), ("mamba", "native"))
# One of each runner beside the parity tests.
PARAMS = [pytest.param(one, id=one[0], marks=pytest.mark.parity if one[0] == "t5" else ()) for one in SERVED]
PROMPTS = (
    "Hello",
    "The quick brown fox jumps over the lazy dog, again and again and again",
    "naïve café, 日本語 and an emoji 🙂",
    "def main() -> None: return None. " * 6,
)
NEW_TOKENS = 12


@dataclass
class Served:
    """A running server and the model it serves, in transformers' hands."""

    server: RunningServer
    model: Any
    tokenizer: Any
    model_type: str
    runner: str

    def expected(self, prompt: str) -> list[int]:
        encoded = self.tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=encoded.input_ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=1
            )
        skipped = 1 if self.model.config.is_encoder_decoder else encoded.input_ids.shape[1]
        ids: list[int] = output[0, skipped:].tolist()
        return ids


@pytest.fixture(scope="module", params=PARAMS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from transformers import AutoTokenizer

    model_type, runner = request.param
    path: Path = tmp_path_factory.mktemp(model_type)
    model = type_checkpoint(model_type, path, vocab_size=VOCAB_SIZE)
    write_tokenizer(path)
    with running_server(path, "--max-total-tokens", "256", "--max-input-tokens", "200") as server:
        yield Served(server, model, AutoTokenizer.from_pretrained(path), model_type, runner)


async def generate(client: httpx.AsyncClient, prompt: str, **parameters: Any) -> dict[str, Any]:
    asked = {"max_new_tokens": NEW_TOKENS, "details": True, **parameters}
    response = await client.post("/generate", json={"inputs": prompt, "parameters": asked})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ids(answer: dict[str, Any]) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


async def test_greedy_tokens_alone_and_together(served: Served) -> None:
    expected = [served.expected(prompt) for prompt in PROMPTS]
    async with httpx.AsyncClient(base_url=served.server.url, timeout=60) as client:
        alone = [ids(await generate(client, prompt)) for prompt in PROMPTS]
        together = await asyncio.gather(*(generate(client, prompt) for prompt in PROMPTS * 2))
    assert alone == expected
    assert [ids(a) for a in together] == expected * 2


async def test_a_request_that_leaves_does_not_disturb_the_others(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.server.url, timeout=60) as client:
        stays = asyncio.create_task(generate(client, PROMPTS[1]))
        async with client.stream(
            "POST", "/generate_stream", json={"inputs": PROMPTS[3], "parameters": {"max_new_tokens": 50}}
        ) as response:
            async for _ in response.aiter_lines():
                break
        assert ids(await stays) == served.expected(PROMPTS[1])
        assert ids(await generate(client, PROMPTS[0])) == served.expected(PROMPTS[0])


def test_the_log_names_the_runner(served: Served) -> None:
    found = f"Runner `{served.runner}` serves {served.model_type}" in served.server.log()
    assert found == (served.runner != "native")


@pytest.mark.long
def test_two_shards_give_the_same_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = type_checkpoint("olmo", tmp_path, vocab_size=VOCAB_SIZE)
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with running_server(tmp_path, "--num-shard", "2", "--max-total-tokens", "256") as server:
        running = Served(server, model, tokenizer, "olmo", "transformers")
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for prompt in PROMPTS[:2]:
                body = {"inputs": prompt, "parameters": {"max_new_tokens": NEW_TOKENS, "details": True}}
                assert ids(client.post("/generate", json=body).json()) == running.expected(prompt)


@pytest.mark.long
def test_a_model_with_states_is_not_sharded(tmp_path: Path) -> None:
    type_checkpoint("rwkv", tmp_path, vocab_size=VOCAB_SIZE)
    write_tokenizer(tmp_path)
    with running_server(tmp_path, "--num-shard", "2", wait=False) as server:
        assert server.process.wait(90) != 0
        assert "cannot be divided among shards: use --num-shard 1" in server.log()
