"""A published model, SmolLM2-135M-Instruct in Q4_1, answers as transformers does with the same weights in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from support.published_models import SMOLLM2, dequantized, fetched
from support.running_server import RunningServer, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\n",
    "The three primary colours are",
    "# How to bake bread\n\n1.",
    "import numpy as np\n\nx = np.",
    "Photosynthesis is the process by which",
    "Q: Who wrote Hamlet?\nA:",
    "SELECT name, age FROM",
    "In 1969, the first man",
    "La capitale de l'Italie est",
    "<html>\n<head>\n<title>",
    "My favourite animal is the",
    "The opposite of hot is",
    '{"name": "Alice", "age":',
    "Monday, Tuesday, Wednesday,",
    "The Earth goes around the",
)
ODD_TEXTS = (
    "  two  blanks ", "\t\n\r\n", "naïve café", "北京", "👩‍👩‍👧", "1234567890", "x" * 50, "don't I'LL",
    "<|im_start|>user\n", "a\u0301\u200b", "https://example.org/?q=1&r=%20", "<|im_end|><|endoftext|>",
)  # fmt: skip
NEW = 12
# Logits that are nearer to each other than this share of the largest one may change places.
NEAR = 1e-4
MESSAGES = [{"role": "user", "content": "Name three fruits."}]
DOG = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    file = fetched(SMOLLM2) / SMOLLM2.file
    options = ("--dtype", "float32", "--kv-cache-memory", str(512 * 2**20), "--enable-prefill-logprobs")
    with running_server(file, *options) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(dequantized(SMOLLM2), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(dequantized(SMOLLM2))


def post(server: RunningServer, path: str, body: Any) -> Any:
    answer = httpx.post(server.url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def generate(server: RunningServer, inputs: str, **parameters: Any) -> Any:
    return post(server, "/generate", {"inputs": inputs, "parameters": {"details": True, **parameters}})


@torch.inference_mode()
def logits_after(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Logits [answer, vocabulary] that transformers computes for each token of the answer."""
    logits: torch.Tensor = model(torch.tensor([[*prompt, *answer]])).logits[0]
    return logits[len(prompt) - 1 : -1]


def assert_greedy(logits: torch.Tensor, ids: Sequence[int]) -> None:
    for row, chosen in zip(logits, ids, strict=True):
        assert row.max() - row[chosen] <= NEAR * row.abs().max()


def test_greedy_tokens_and_logprobs_of_a_batch(server: RunningServer, model: Any, tokenizer: Any) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = {"max_new_tokens": NEW, "decoder_input_details": True}
        answers = list(pool.map(lambda prompt: generate(server, prompt, **asked), PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        prompt_ids = [token["id"] for token in answer["details"]["prefill"]]
        tokens = answer["details"]["tokens"]
        ids = [token["id"] for token in tokens]
        assert prompt_ids == tokenizer(prompt).input_ids
        assert len(ids) == NEW or answer["details"]["finish_reason"] == "eos_token"
        assert answer["generated_text"] == tokenizer.decode(ids, skip_special_tokens=True)
        logits = logits_after(model, prompt_ids[:1], [*prompt_ids[1:], *ids])
        assert_greedy(logits[-len(ids) :], ids)
        found = [token["logprob"] for token in (*answer["details"]["prefill"][1:], *tokens)]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor([*prompt_ids[1:], *ids])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-3, atol=1e-3)


def test_tokens_of_odd_texts(server: RunningServer, tokenizer: Any) -> None:
    for text in ODD_TEXTS:
        found = [token["id"] for token in post(server, "/tokenize", {"inputs": text})]
        assert found == tokenizer(text).input_ids, text


def test_a_chat_goes_through_the_models_template(server: RunningServer, model: Any, tokenizer: Any) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 5}
    answer = post(server, "/v1/chat/completions", body)
    (choice,) = answer["choices"]
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert "You are a helpful AI assistant named SmolLM" in prompt
    prompt_ids = tokenizer(prompt).input_ids
    assert answer["usage"]["prompt_tokens"] == len(prompt_ids)
    plain = generate(server, prompt, max_new_tokens=24)
    assert choice["message"]["content"] == plain["generated_text"]

    ids = [token["id"] for token in plain["details"]["tokens"]]
    logits = logits_after(model, prompt_ids, ids)
    assert_greedy(logits, ids)
    best = logits.log_softmax(-1).topk(5).values
    # The end of the turn is no text, and has no entry.
    said = choice["logprobs"]["content"]
    assert len(said) >= len(ids) - 1
    for entry, values in zip(said, best, strict=False):
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        found = [one["logprob"] for one in entry["top_logprobs"]]
        torch.testing.assert_close(torch.tensor(found), values, rtol=1e-3, atol=1e-3)

    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body | {"stream": True}, timeout=120) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == choice["message"]["content"]


def test_a_stop_text_ends_the_answer(server: RunningServer) -> None:
    prompt = PROMPTS[1]
    whole = generate(server, prompt, max_new_tokens=24)["generated_text"]
    stop = whole.split()[3]
    native = generate(server, prompt, max_new_tokens=24, stop=[stop])
    assert native["details"]["finish_reason"] == "stop_sequence"
    assert native["generated_text"] == whole[: whole.index(stop) + len(stop)]
    completion = post(server, "/v1/completions", {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stop": stop})[
        "choices"
    ][0]
    assert completion["finish_reason"] == "stop"
    assert completion["text"] == whole[: whole.index(stop)]


def test_an_answer_is_json_of_a_schema(server: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "dog", "strict": True, "schema": DOG}}
    chat = [{"role": "user", "content": "Describe a dog as JSON with its name and its age."}]
    body = {"messages": chat, "temperature": 0, "max_tokens": 80, "response_format": form}
    (choice,) = post(server, "/v1/chat/completions", body)["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), DOG)
