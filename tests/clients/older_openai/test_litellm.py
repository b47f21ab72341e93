"""litellm: the same server as `huggingface/...` and as `openai/...`; text, streams, tools, exceptions."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

HELLO = [{"role": "user", "content": "Hello! What is 2 plus 3?"}]
HELLO_BACK = "Hello! 2 plus 3 is 5."
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
ANNA = [{"role": "user", "content": "Give me a JSON object with name and age for Anna, 30."}]
BREAK_DOWN = [{"role": "user", "content": "break down"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "The city"}},
            "required": ["location"],
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=["huggingface", "openai"])
def asked(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    """How either provider is told about a server."""
    return _served(request.param, url)


def _served(provider: str, url: str, key: str = "-") -> dict[str, Any]:
    base = url if provider == "huggingface" else f"{url}/v1"
    return {"model": f"{provider}/tgi", "api_base": base, "api_key": key, "max_retries": 0, "temperature": 0}


def test_completion(asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HELLO, max_tokens=40, **asked)
    assert answer.choices[0].message.content == HELLO_BACK and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 5
    assert (
        litellm.completion(messages=[{"role": "user", "content": "Count to 10."}], stop=", 5", **asked)
        .choices[0]
        .message.content
        == "1, 2, 3, 4"
    )


async def test_streams(asked: dict[str, Any]) -> None:
    stream = litellm.completion(messages=HELLO, stream=True, stream_options={"include_usage": True}, **asked)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO_BACK
    assert chunks[-1].usage.completion_tokens > 5
    stream = await litellm.acompletion(messages=HELLO, stream=True, **asked)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == HELLO_BACK


def test_text_completion(url: str) -> None:
    options = _served("openai", url) | {"model": "text-completion-openai/tgi"}
    answer = litellm.text_completion(prompt="The capital of France is", max_tokens=8, **options)
    assert answer.choices[0].text.startswith(" Paris")


def test_tools(asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=PARIS, tools=[WEATHER], tool_choice="required", max_tokens=60, **asked)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"location": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_streamed_tools(asked: dict[str, Any]) -> None:
    chunks = list(litellm.completion(messages=PARIS, tools=[WEATHER], tool_choice="required", stream=True, **asked))
    whole = litellm.stream_chunk_builder(chunks, messages=PARIS)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"location": "Paris"}


def test_response_format(asked: dict[str, Any]) -> None:
    for response_format in ({"type": "json_object"}, Person):
        answer = litellm.completion(messages=ANNA, response_format=response_format, max_tokens=60, **asked)
        assert Person.model_validate_json(answer.choices[0].message.content) == Person(name="Anna", age=30)


@pytest.mark.parametrize(
    ("provider", "kind", "too_long"),
    [
        ("huggingface", litellm.BadRequestError, litellm.ContextWindowExceededError),
        ("openai", litellm.BadRequestError, litellm.ContextWindowExceededError),
    ],
)
def test_validation(url: str, provider: str, kind: type[Exception], too_long: type[Exception]) -> None:
    options = _served(provider, url)
    with pytest.raises(kind, match="temperature") as caught:
        litellm.completion(messages=HELLO, **(options | {"temperature": -1}))
    assert type(caught.value) is kind
    with pytest.raises(too_long, match="maximum context length is 4095 tokens"):
        litellm.completion(messages=[{"role": "user", "content": "Hello " * 6000}], **options)


@pytest.mark.parametrize("provider", ["huggingface", "openai"])
def test_overloaded(busy_url: str, provider: str) -> None:
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(messages=HELLO, **_served(provider, busy_url))


@pytest.mark.parametrize("provider", ["huggingface", "openai"])
def test_failures(faulty_url: str, key: str, provider: str) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=HELLO, **_served(provider, faulty_url, "wrong"))
    with pytest.raises(litellm.InternalServerError, match="out of memory") as caught:
        litellm.completion(messages=BREAK_DOWN, **_served(provider, faulty_url, key))
    assert caught.value.status_code == 500
    # How a failure in a stream is called differs between litellm's providers; both carry the words of the server.
    kind = litellm.APIError if provider == "huggingface" else litellm.exceptions.MidStreamFallbackError
    with pytest.raises(kind, match="out of memory"):
        list(litellm.completion(messages=BREAK_DOWN, stream=True, **_served(provider, faulty_url, key)))
