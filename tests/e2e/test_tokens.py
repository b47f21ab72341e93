"""Tokens through the whole path (HTTP, router, gRPC, shards) equal transformers' on the same checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.running_server import RunningServer, running_server
from support.tiny_models import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.e2e

# Of one mechanism each; the parity tests hold all families to transformers, without a server.
FAMILIES = [
    pytest.param(family, num_shard, marks=() if family in often else mark)
    for num_shard, often, mark in ((1, ["llama"], pytest.mark.long), (2, [], pytest.mark.weekly))
    for family in ("llama", "mistral", "qwen2", "qwen3")
]
PROMPTS = (
    "Hello",
    "The quick brown fox jumps over the lazy dog, again and again and again",
    "naïve café, 日本語 and an emoji 🙂",
    "def main() -> None: return None. " * 6,
)
NEW_TOKENS = 24
# Two tokens that score nearly alike may change places: a first mismatch counts only above this gap, relative to the
# largest logit.
NEAR_TIE = 1e-4


@dataclass
class Reference:
    """transformers, one prompt at a time."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, path: Path) -> Reference:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        return cls(model, AutoTokenizer.from_pretrained(path))

    def generate(self, prompt: str, new_tokens: int) -> list[int]:
        encoded = self.tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            output = self.model.generate(
                **encoded, max_new_tokens=new_tokens, do_sample=False, pad_token_id=self.tokenizer.eos_token_id
            )
        ids: list[int] = output[0, encoded.input_ids.shape[1] :].tolist()
        return ids

    def assert_same(self, prompt: str, got: list[int]) -> None:
        want = self.generate(prompt, NEW_TOKENS)
        if got == want:
            return
        at = next(i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b)
        ids = torch.tensor([self.tokenizer(prompt).input_ids + want[:at]])
        with torch.inference_mode():
            logits = self.model(ids).logits[0, -1]
        gap = float(logits.max() - logits[got[at]])
        assert gap <= NEAR_TIE * float(logits.abs().max()), f"token {at} of {prompt!r}: {got} instead of {want}"


def _tokens(client: httpx.Client, prompt: str, **parameters: Any) -> list[int]:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": NEW_TOKENS, "details": True, **parameters}}
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return [t["id"] for t in response.json()["details"]["tokens"]]


@pytest.fixture(scope="module")
def two_shards(llama: Path) -> Iterator[RunningServer]:
    with running_server(llama, "--dtype", "float32", "--num-shard", "2") as running:
        yield running


@contextlib.contextmanager
def served(request: pytest.FixtureRequest, family: str, num_shard: int) -> Iterator[tuple[Path, RunningServer]]:
    """A checkpoint and a server of it: llama's are shared."""
    if family == "llama":
        yield (
            request.getfixturevalue("llama"),
            request.getfixturevalue("two_shards" if num_shard == 2 else "llama_server"),
        )
        return
    folder = tiny_checkpoint(family, request.getfixturevalue("tmp_path"))
    with running_server(folder, "--dtype", "float32", "--num-shard", str(num_shard)) as server:
        yield folder, server


@pytest.mark.parametrize(("family", "num_shard"), FAMILIES)
def test_greedy_tokens_equal_transformers(request: pytest.FixtureRequest, family: str, num_shard: int) -> None:
    with (
        served(request, family, num_shard) as (folder, server),
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        reference = Reference.load(folder)
        for prompt in PROMPTS:
            reference.assert_same(prompt, _tokens(client, prompt))


def _mixed_requests() -> list[dict[str, Any]]:
    """32 requests of all lengths; a third greedy, a third seeded, a third with penalties too."""
    rng = random.Random(5)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    requests = []
    for i in range(32):
        parameters: dict[str, Any] = {"max_new_tokens": rng.randint(1, 40), "details": True}
        if i % 3:
            parameters |= {"do_sample": True, "seed": i, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
        if i % 3 == 2:
            parameters |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "typical_p": 0.9}
        requests.append({"inputs": " ".join(rng.choices(words, k=rng.randint(1, 60))), "parameters": parameters})
    return requests


async def test_thirty_two_at_once_get_what_each_gets_alone(llama_server: RunningServer) -> None:
    requests = _mixed_requests()
    async with httpx.AsyncClient(base_url=llama_server.url, timeout=120) as client:

        async def ask(body: dict[str, Any]) -> list[int]:
            response = await client.post("/generate", json=body)
            assert response.status_code == 200, response.text
            return [t["id"] for t in response.json()["details"]["tokens"]]

        alone = [await ask(body) for body in requests]
        together = await asyncio.gather(*(ask(body) for body in requests))
    assert together == alone


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
# One of every way to choose a token, and of everything that is told of one.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"top_n_tokens": 5},
    {"repetition_penalty": 1.4},
    {"do_sample": True, "seed": 1},
    {"do_sample": True, "seed": 2, "temperature": 0.7, "top_k": 10},
    {"do_sample": True, "seed": 3, "top_p": 0.8, "top_n_tokens": 2},
    {"do_sample": True, "seed": 4, "typical_p": 0.7, "frequency_penalty": 1.0},
    {"watermark": True},
    {"watermark": True, "do_sample": True, "seed": 5},
    {"grammar": {"type": "json", "value": SCHEMA}},
    {"grammar": {"type": "json", "value": SCHEMA}, "do_sample": True, "seed": 6, "temperature": 2.0},
    {"grammar": {"type": "regex", "value": "[a-f]{3}-[0-9]{4}"}, "repetition_penalty": 1.2},
    {"stop": ["e", "a b"]},
    {"stop": ["o"], "do_sample": True, "seed": 7, "min_p": 0.05},
    {"decoder_input_details": True},
    {"truncate": 7, "ignore_eos": True},
    {"min_tokens": 9, "stop": ["e"]},
)


def test_a_token_ends_an_answer(llama_server: RunningServer) -> None:
    asked = {"inputs": "one two", "parameters": {"max_new_tokens": 8, "details": True}}
    tokens = httpx.post(f"{llama_server.url}/generate", json=asked, timeout=60).json()["details"]["tokens"]
    ids = [token["id"] for token in tokens]
    last = next(number for number in range(2, 8) if ids.index(ids[number]) == number)
    body = {"prompt": "one two", "max_tokens": 8, "temperature": 0, "stop_token_ids": [ids[last]]}
    answer = httpx.post(f"{llama_server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == last + 1
    assert answer["choices"][0]["text"] == "".join(token["text"] for token in tokens[: last + 1])


async def test_all_kinds_in_one_batch_get_what_each_gets_alone(llama_server: RunningServer) -> None:
    words = ["one", "two", "three", "four", "five"]
    bodies = [
        {
            "inputs": " ".join(words[(i + j) % 5] for j in range(3 + 2 * i)),
            "parameters": {"max_new_tokens": 30, "details": True, **kind},
        }
        for i, kind in enumerate(KINDS)
    ]
    async with httpx.AsyncClient(base_url=llama_server.url, timeout=120) as client:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            response = await client.post("/generate", json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        alone = [await ask(body) for body in bodies]
        together = await asyncio.gather(*(ask(body) for body in bodies))
    for kind, one, other in zip(KINDS, alone, together, strict=True):
        _assert_same(one, other, kind)


def _assert_same(one: Any, other: Any, kind: Any) -> None:
    """Logprobs may differ in the last digits: sums over a larger batch are added up in another order."""
    assert type(one) is type(other), kind
    if isinstance(one, dict):
        assert one.keys() == other.keys(), kind
        for key in one:
            _assert_same(one[key], other[key], kind)
    elif isinstance(one, list):
        assert len(one) == len(other), kind
        for a, b in zip(one, other, strict=True):
            _assert_same(a, b, kind)
    elif isinstance(one, float):
        assert other == pytest.approx(one, abs=1e-3), kind
    else:
        assert one == other, kind


@pytest.mark.long
def test_one_seed_gives_the_same_tokens_at_any_number_of_shards(
    llama_server: RunningServer, two_shards: RunningServer
) -> None:
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50}
    with httpx.Client(base_url=llama_server.url, timeout=60) as client:
        one = [_tokens(client, p, seed=i, **sampling) for i, p in enumerate(PROMPTS)]
        assert one == [_tokens(client, p, seed=i, **sampling) for i, p in enumerate(PROMPTS)]
        assert one != [_tokens(client, p, seed=i + 100, **sampling) for i, p in enumerate(PROMPTS)]
    with httpx.Client(base_url=two_shards.url, timeout=60) as client:
        assert one == [_tokens(client, p, seed=i, **sampling) for i, p in enumerate(PROMPTS)]
