"""Real clients, abandoned requests and refusals against one running server with a small KV cache."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient
from support.running_server import RunningServer, running_server

pytestmark = pytest.mark.e2e

CAPACITY = 64 * 16
MAX_TOTAL = 512
MAX_CONCURRENT = 12


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    sampling = tmp_path_factory.mktemp("sampling")
    (sampling / "generation_config.json").write_text(json.dumps({"top_k": 40, "temperature": 0.9}))
    with running_server(
        llama, "--dtype", "float32", "--max-batch-total-tokens", str(CAPACITY), "--max-batch-prefill-tokens",
        str(MAX_TOTAL), "--max-total-tokens", str(MAX_TOTAL), "--max-input-tokens", "500",
        "--max-concurrent-requests", str(MAX_CONCURRENT), "--enable-prefill-logprobs",
        "--generation-config", str(sampling), "--override-generation-config", '{"top_k": 1}',
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened


def _generate(client: httpx.Client, inputs: str = "Hello", **parameters: Any) -> httpx.Response:
    return client.post("/generate", json={"inputs": inputs, "parameters": parameters})


def test_defaults_of_sampling_hold_on_openai_s_routes_alone(client: httpx.Client) -> None:
    assert client.get("/info").json()["sampling_defaults"] == {"temperature": 0.9, "top_k": 1}

    def completed(**fields: Any) -> str:
        body = {"prompt": "Hello", "max_tokens": 16, **fields}
        return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])

    greedy = completed(temperature=0)
    assert {completed(), completed(seed=1), completed(seed=2), completed(temperature=5, seed=3)} == {greedy}
    assert completed(seed=1, top_k=-1) != completed(seed=2, top_k=-1), "the request wins"
    drawn = {_generate(client, do_sample=True, seed=seed, max_new_tokens=16).text for seed in (1, 2)}
    assert len(drawn) == 2, "TGI's routes have TGI's defaults"


def test_openai_chat(server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "Hello!"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        whole = client.chat.completions.create(model="tgi", messages=messages, max_tokens=12, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model="tgi", messages=messages, max_tokens=12, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        assert [m.id for m in client.models.list()]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tgi", messages=messages, temperature=-1)
        assert refused.value.param == "temperature" and "temperature" in refused.value.message
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason in {"stop", "length"}
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({c.id for c in chunks}) == 1


def test_openai_completions(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        create = client.completions.create
        asked: Any = {"model": "tgi", "max_tokens": 12, "temperature": 0}
        whole = create(prompt=["The quick", "Hello"], logprobs=2, **asked)
        for index, prompt in enumerate(("The quick", "Hello")):
            chunks = list(create(prompt=prompt, stream=True, stream_options={"include_usage": True}, **asked))
            assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[index].text
            assert chunks[-2].choices[0].finish_reason == whole.choices[index].finish_reason
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.top_logprobs is not None
        for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
            assert top[token] == max(top.values()), "greedy"
        spans = httpx.post(f"{server.url}/tokenize", json={"inputs": "The quick"}).json()
        prompt_ids = [span["id"] for span in spans]
        told = {"inputs": "The quick", "parameters": {"max_new_tokens": 12, "details": True}}
        details = httpx.post(f"{server.url}/generate", json=told).json()["details"]
        ids = [*prompt_ids, *(token["id"] for token in details["tokens"])]
        scored = create(prompt=ids, echo=True, logprobs=1, **(asked | {"max_tokens": 1})).choices[0].logprobs
        assert scored is not None and scored.tokens is not None and scored.top_logprobs is not None
        assert scored.token_logprobs is not None and scored.top_logprobs[0] is None
        for token, logprob, best in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True):
            if best is not None:
                assert best[token] == logprob and len(best) <= 2
        greedy = [best is not None and best[t] == max(best.values()) for t, best in
                  zip(scored.tokens, scored.top_logprobs, strict=True)]  # fmt: skip
        assert all(greedy[len(prompt_ids) :]), "what the model wrote"
        assert not all(greedy[1 : len(prompt_ids)]), "what it did not"
        echoed = create(prompt="The quick", echo=True, logprobs=0, **asked).choices[0]
        assert echoed.text == "The quick" + whole.choices[0].text and echoed.logprobs is not None
        assert echoed.logprobs.token_logprobs is not None and echoed.logprobs.tokens is not None
        assert echoed.logprobs.token_logprobs[0] is None and None not in echoed.logprobs.token_logprobs[1:]
        assert echoed.logprobs.tokens[-len(logprobs.tokens) :] == logprobs.tokens
        by_ids = create(prompt=prompt_ids, **asked)
        assert by_ids.choices[0].text == whole.choices[0].text
        with pytest.raises(openai.BadRequestError):
            create(prompt="x", suffix="y", model="tgi")


def test_huggingface_hub(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it would refuse our own server too
    client = InferenceClient(server.url)
    whole = client.text_generation("Hello", max_new_tokens=10, details=True, return_full_text=False)
    streamed = list(
        client.text_generation("Hello", max_new_tokens=10, details=True, stream=True, return_full_text=False)
    )
    assert whole.details is not None
    assert [t.token.id for t in streamed] == [t.id for t in whole.details.tokens]
    assert streamed[-1].generated_text == whole.generated_text
    answer = client.chat_completion([{"role": "user", "content": "Hello"}], max_tokens=5)
    assert answer.choices[0].message.role == "assistant"


def test_streamed_pieces_are_the_text(client: httpx.Client) -> None:
    body = {"inputs": "The quick", "parameters": {"max_new_tokens": 40, "details": True}}
    with client.stream("POST", "/generate_stream", json=body) as response:
        events = [json.loads(line[5:]) for line in response.iter_lines() if line.startswith("data:")]
    assert [e["index"] for e in events] == list(range(1, len(events) + 1))
    pieces = "".join(e["token"]["text"] for e in events if not e["token"]["special"])
    assert pieces.rstrip("\ufffd") == events[-1]["generated_text"].rstrip("\ufffd")
    assert events[-1]["details"]["generated_tokens"] == len(events)


def test_prompt_details_and_top_tokens(client: httpx.Client) -> None:
    details = _generate(
        client, "The quick brown fox", max_new_tokens=3, decoder_input_details=True, top_n_tokens=2
    ).json()["details"]
    assert details["prefill"][0]["logprob"] is None
    assert all(t["logprob"] <= 0 for t in details["prefill"][1:])
    assert len(details["top_tokens"]) == 3 and all(len(step) >= 2 for step in details["top_tokens"])


def test_long_generations_are_exact_and_impossible_ones_refused(client: httpx.Client) -> None:
    answer = _generate(client, max_new_tokens=400, details=True, ignore_eos=True).json()
    assert answer["details"]["generated_tokens"] == 400
    for inputs, parameters, words in [
        ("Hello", {"max_new_tokens": 512}, "`inputs` tokens + `max_new_tokens` must be <= 512. Given: "),
        ("word " * 700, {"max_new_tokens": 1}, "must be <= 512"),
        ("", {}, "`inputs` cannot be empty"),
        ("Hello", {"temperature": 0}, "temperature"),
    ]:
        response = _generate(client, inputs, **parameters)
        assert response.status_code == 422 and response.json()["error_type"] == "validation"
        assert words in response.json()["error"], response.text


async def test_more_than_the_permits_are_refused_and_the_rest_answered(server: RunningServer) -> None:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 60, "ignore_eos": True}}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        answers = await asyncio.gather(*(client.post("/generate", json=body) for _ in range(3 * MAX_CONCURRENT)))
    statuses = [a.status_code for a in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= MAX_CONCURRENT
    refused = next(a for a in answers if a.status_code == 429)
    assert refused.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
    assert int(refused.headers["retry-after"]) >= 1


async def test_abandoned_requests_leave_nothing_behind(server: RunningServer) -> None:
    rng = random.Random(11)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def abandon(index: int) -> None:
            route = "/generate_stream" if index % 2 else "/generate"
            parameters = {"max_new_tokens": 300, "ignore_eos": True}
            body = {"inputs": "Hello " * rng.randint(1, 40), "parameters": parameters}
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.005, 0.2)):
                    async with client.stream("POST", route, json=body) as response:
                        async for _ in response.aiter_lines():
                            assert response.status_code in {200, 429}
                        await asyncio.sleep(1)

        for first in range(0, 60, 10):
            await asyncio.gather(*(abandon(i) for i in range(first, first + 10)))
        # All blocks are free again only if two requests of half the cache each can run at once.
        big = {"inputs": "Hello", "parameters": {"max_new_tokens": 490, "details": True, "ignore_eos": True}}
        answers = await asyncio.gather(client.post("/generate", json=big), client.post("/generate", json=big))
        assert [a.status_code for a in answers] == [200, 200]
        assert [a.json()["details"]["generated_tokens"] for a in answers] == [490, 490]
        metrics = (await client.get("/metrics")).text
    assert 'tgi_request_failure{err="dropped"}' in metrics
    assert "\ntgi_batch_current_size 0" in metrics and "\ntgi_queue_size 0" in metrics


def test_health_tells_the_truth(client: httpx.Client) -> None:
    for route in ("/health", "/ping", "/"):
        assert client.get(route).status_code == 200
    info = client.get("/info").json()
    assert (info["version"], info["max_total_tokens"], info["max_input_tokens"]) == ("3.3.7", MAX_TOTAL, 500)
    assert info["max_batch_total_tokens"] == CAPACITY
