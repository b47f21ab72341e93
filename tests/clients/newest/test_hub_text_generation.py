"""huggingface_hub 2: `text_generation` in all its forms, at once and streamed, sync and async."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

CAPITAL = "The capital of France is"
COUNT = "1, 2, 3, 4, 5,"
TEN: dict[str, Any] = {"max_new_tokens": 10}


@pytest.fixture
def client(url: str) -> InferenceClient:
    return InferenceClient(url)


def test_plain_text(client: InferenceClient) -> None:
    assert client.text_generation(CAPITAL, max_new_tokens=8, return_full_text=False).startswith(" Paris")
    assert client.text_generation(CAPITAL, max_new_tokens=8).startswith(f"{CAPITAL} Paris")


def test_each_base_url(url: str) -> None:
    for base in (url, f"{url}/", f"{url}/generate"):
        assert " Paris" in InferenceClient(base).text_generation(CAPITAL, max_new_tokens=8, return_full_text=False)


def test_details(client: InferenceClient) -> None:
    answer = client.text_generation(
        COUNT, details=True, decoder_input_details=True, top_n_tokens=2, max_new_tokens=3, return_full_text=False
    )
    details = answer.details
    assert details is not None and details.finish_reason == "length" and details.generated_tokens == 3
    assert "".join(token.text for token in details.tokens) == answer.generated_text
    assert details.prefill[0].logprob is None and "".join(token.text for token in details.prefill).endswith(COUNT)
    assert all(token.logprob <= 0 and token.special is False for token in details.tokens)
    assert details.top_tokens is not None and [len(tokens) for tokens in details.top_tokens] == [2, 2, 2]
    assert details.seed is None, "greedy without sampling parameters"


def test_sampling_parameters(client: InferenceClient) -> None:
    def sampled(seed: int) -> str:
        return client.text_generation(
            "Once upon a time", max_new_tokens=30, do_sample=True, temperature=1.5, top_k=50, top_p=0.99,
            typical_p=0.99, repetition_penalty=1.1, frequency_penalty=0.1, truncate=20, seed=seed,
        )  # fmt: skip

    assert sampled(7) == sampled(7)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_best_of(client: InferenceClient) -> None:
    answer = client.text_generation(
        "Once upon a time", details=True, best_of=2, do_sample=True, temperature=1.5, max_new_tokens=10
    )
    others = answer.details.best_of_sequences
    assert others is not None and len(others) == 1 and others[0].generated_tokens == 10


def test_stop_text(client: InferenceClient) -> None:
    answer = client.text_generation("1, 2, 3, 4, 5,", details=True, stop=[" 8"], max_new_tokens=40)
    assert answer.generated_text.endswith("6, 7, 8") and answer.details.finish_reason == "stop_sequence"


def test_stream(client: InferenceClient) -> None:
    whole = client.text_generation(COUNT, return_full_text=False, **TEN)
    assert whole.startswith(" 6, 7") and "".join(client.text_generation(COUNT, stream=True, **TEN)) == whole


def test_stream_with_details(client: InferenceClient) -> None:
    events = list(client.text_generation(COUNT, stream=True, details=True, max_new_tokens=6, return_full_text=False))
    assert [event.index for event in events] == [1, 2, 3, 4, 5, 6]
    assert all(event.details is None and event.generated_text is None for event in events[:-1])
    last = events[-1]
    assert last.generated_text == "".join(event.token.text for event in events)
    assert last.details is not None and last.details.finish_reason == "length"
    assert last.details.generated_tokens == 6 and last.details.input_length > 0


@pytest.mark.parametrize("kind", ["json", "json_schema"])
def test_json_grammar(client: InferenceClient, kind: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    grammar: Any = {"type": kind, "value": {"name": "person", "schema": schema} if kind == "json_schema" else schema}
    text = client.text_generation(
        "Anna is 30 years old. As JSON: ", grammar=grammar, max_new_tokens=60, return_full_text=False
    )
    assert set(json.loads(text)) == {"name", "age"}


def test_regex_grammar(client: InferenceClient) -> None:
    grammar: Any = {"type": "regex", "value": "[0-9]{3}-[0-9]{2}"}
    text = client.text_generation("My number is ", grammar=grammar, max_new_tokens=20, return_full_text=False)
    assert len(text) == 6 and text[3] == "-" and text.replace("-", "").isdigit()


async def test_async_forms(url: str) -> None:
    async with AsyncInferenceClient(url) as client:
        text = await client.text_generation(COUNT, return_full_text=False, **TEN)
        assert text.startswith(" 6, 7")
        pieces = [piece async for piece in await client.text_generation(COUNT, stream=True, **TEN)]
        assert "".join(pieces) == text
        answer = await client.text_generation(COUNT, details=True, return_full_text=False, **TEN)
        assert answer.generated_text == text and answer.details.generated_tokens == len(pieces)
        events = [event async for event in await client.text_generation(COUNT, stream=True, details=True, **TEN)]
        assert events[-1].generated_text.endswith(text) and events[-1].details.generated_tokens == len(events)


def test_health_and_info(url: str) -> None:
    client = InferenceClient(url, provider="hf-inference")
    assert client.health_check() is True
    info = client.get_endpoint_info()
    assert info["model_id"] == "demo" and info["version"] == "3.3.7"
