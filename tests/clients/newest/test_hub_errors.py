"""huggingface_hub 2: every error of the server arrives as the exception that it is."""

from __future__ import annotations

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import (
    GenerationError,
    HfHubHTTPError,
    IncompleteGenerationError,
    OverloadedError,
    UnknownError,
    ValidationError,
)

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temperature": -1.0}, "`temperature` must be > 0"),
        ({"max_new_tokens": 100_000, "truncate": 100_000}, "`truncate`"),
        ({"top_p": 1.5}, "`top_p`"),
        ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"adapter_id": "unknown"}, "`adapter_id`"),
        ({"grammar": {"type": "regex", "value": "("}}, "grammar"),
    ],
)
def test_validation(url: str, parameters: dict[str, object], words: str, stream: bool) -> None:
    with pytest.raises(ValidationError, match="Input validation error") as caught:
        list(InferenceClient(url).text_generation("Hello", stream=stream, **parameters))  # type: ignore[call-overload]
    assert words in str(caught.value)


def test_what_a_stream_refuses(url: str) -> None:
    with pytest.raises(ValidationError, match="streaming"):
        list(InferenceClient(url).text_generation("Hello", stream=True, best_of=2, do_sample=True))


def test_too_long(url: str) -> None:
    with pytest.raises(ValidationError, match=r"`inputs` tokens \+ `max_new_tokens` must be <= 4096. Given: \d+ `inp"):
        InferenceClient(url).text_generation("Hello " * 6000, max_new_tokens=8)


@pytest.mark.parametrize("stream", [False, True])
def test_overloaded(busy_url: str, stream: bool) -> None:
    with pytest.raises(OverloadedError, match="Model is overloaded"):
        list(InferenceClient(busy_url).text_generation("Hello", max_new_tokens=2, stream=stream))


def test_overloaded_chat(busy_url: str) -> None:
    with pytest.raises(HfHubHTTPError, match="Model is overloaded") as caught:
        InferenceClient(base_url=busy_url).chat_completion(HELLO, max_tokens=2)
    assert caught.value.response.status_code == 429 and int(caught.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_failures_of_generation(faulty_url: str, key: str, stream: bool) -> None:
    client = InferenceClient(faulty_url, token=key)
    with pytest.raises(GenerationError, match="Request failed during generation: Server error: out of memory"):
        list(client.text_generation("break down", stream=stream))
    if not stream:
        with pytest.raises(IncompleteGenerationError, match="Incomplete generation"):
            client.text_generation("stop short")


def test_failures_of_chat(faulty_url: str, key: str) -> None:
    client = InferenceClient(base_url=faulty_url, token=key)
    with pytest.raises(HfHubHTTPError, match="out of memory") as caught:
        client.chat_completion([{"role": "user", "content": "break down"}])
    assert caught.value.response.status_code == 500
    assert caught.value.response.headers["x-request-id"] in str(caught.value)
    received = []
    with pytest.raises(GenerationError, match="out of memory"):
        for chunk in client.chat_completion([{"role": "user", "content": "break down"}], stream=True):
            received.append(chunk.choices[0].delta.content)
    assert "".join(received) == "one two"


def test_chat_validation(url: str) -> None:
    with pytest.raises(HfHubHTTPError, match="`temperature` must be >= 0") as caught:
        InferenceClient(base_url=url).chat_completion(HELLO, temperature=-1.0)
    assert caught.value.response.status_code == 400


def test_wrong_key(faulty_url: str) -> None:
    for token in ("wrong", None):
        client = InferenceClient(base_url=faulty_url, token=token)
        with pytest.raises(UnknownError, match="invalid or missing API key"):
            client.text_generation("Hello")
        with pytest.raises(HfHubHTTPError, match="API key") as caught:
            client.chat_completion(HELLO)
        assert caught.value.response.status_code == 401


def test_wrong_route(url: str) -> None:
    with pytest.raises(UnknownError, match="route /v1 not found; GET /docs lists the routes"):
        InferenceClient(f"{url}/v1").text_generation("Hello")


async def test_async_errors(url: str, faulty_url: str, key: str) -> None:
    async with AsyncInferenceClient(url) as client:
        with pytest.raises(ValidationError, match="temperature"):
            await client.text_generation("Hello", temperature=-1.0)
        with pytest.raises(ValidationError, match="temperature"):
            _ = [piece async for piece in await client.text_generation("Hello", temperature=-1.0, stream=True)]
    async with AsyncInferenceClient(faulty_url, token=key) as client:
        with pytest.raises(GenerationError, match="out of memory"):
            await client.text_generation("break down")
        with pytest.raises(GenerationError, match="out of memory"):
            _ = [piece async for piece in await client.text_generation("break down", stream=True)]
