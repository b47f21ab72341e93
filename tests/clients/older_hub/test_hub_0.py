"""huggingface_hub 0.36, still installed widely: requests for the sync client, aiohttp for the async one."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, HfHubHTTPError, OverloadedError, ValidationError

COUNT = "1, 2, 3, 4, 5,"
HELLO = [{"role": "user", "content": "Hello! What is 2 plus 3?"}]
HELLO_BACK = "Hello! 2 plus 3 is 5."
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def test_text_generation(url: str) -> None:
    client = InferenceClient(url)
    whole = client.text_generation(COUNT, max_new_tokens=10, return_full_text=False)
    assert whole.startswith(" 6, 7")
    assert "".join(client.text_generation(COUNT, max_new_tokens=10, stream=True)) == whole
    details = client.text_generation(COUNT, max_new_tokens=10, details=True).details
    assert details is not None and details.generated_tokens == 10 and details.finish_reason == "length"
    events = list(client.text_generation(COUNT, max_new_tokens=10, details=True, stream=True))
    assert events[-1].details is not None and events[-1].details.generated_tokens == 10


def test_chat(url: str) -> None:
    client = InferenceClient(base_url=url)
    answer = client.chat_completion(HELLO, temperature=0.0, max_tokens=40)
    assert answer.choices[0].message.content == HELLO_BACK
    stream = client.chat_completion(HELLO, temperature=0.0, max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == HELLO_BACK
    anna = [{"role": "user", "content": "Give me a JSON object with name and age for Anna, 30."}]
    answer = client.chat_completion(
        anna, temperature=0.0, max_tokens=60, response_format={"type": "json_object", "value": PERSON}
    )  # type: ignore[arg-type]
    assert json.loads(answer.choices[0].message.content) == {"name": "Anna", "age": 30}


async def test_async_client(url: str) -> None:
    client = AsyncInferenceClient(url)
    whole = await client.text_generation(COUNT, max_new_tokens=10, return_full_text=False)
    pieces = [piece async for piece in await client.text_generation(COUNT, max_new_tokens=10, stream=True)]
    assert "".join(pieces) == whole
    stream = await client.chat_completion(HELLO, temperature=0.0, max_tokens=40, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == HELLO_BACK
    with pytest.raises(ValidationError, match="temperature"):
        await client.text_generation("Hello", temperature=-1.0)


def test_overload(busy_url: str) -> None:
    with pytest.raises(OverloadedError, match="Model is overloaded"):
        InferenceClient(busy_url).text_generation("Hello")
    with pytest.raises(HfHubHTTPError, match="overloaded"):
        InferenceClient(base_url=busy_url).chat_completion(HELLO)


def test_validation_and_failures(url: str, faulty_url: str, key: str) -> None:
    with pytest.raises(ValidationError, match="`temperature` must be > 0"):
        InferenceClient(url).text_generation("Hello", temperature=-1.0)
    with pytest.raises(GenerationError, match="out of memory"):
        InferenceClient(faulty_url, token=key).text_generation("break down")
    with pytest.raises(GenerationError, match="out of memory"):
        list(InferenceClient(faulty_url, token=key).text_generation("break down", stream=True))
    with pytest.raises(HfHubHTTPError, match="API key"):
        InferenceClient(base_url=faulty_url, token="wrong").chat_completion(HELLO)
