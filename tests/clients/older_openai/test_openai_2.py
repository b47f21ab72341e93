"""openai 2, which others build on: chat, a stream, `parse`, tools, the kinds of exceptions."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

HELLO: Any = [{"role": "user", "content": "Hello! What is 2 plus 3?"}]
HELLO_BACK = "Hello! 2 plus 3 is 5."


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """Get the current weather"""

    location: str


def _client(url: str, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_chat(url: str) -> None:
    with _client(url) as client:
        create = client.chat.completions.create
        assert create(model="tgi", messages=HELLO, temperature=0).choices[0].message.content == HELLO_BACK
        stream = create(model="tgi", messages=HELLO, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == HELLO_BACK


def test_parse(url: str) -> None:
    anna: Any = [{"role": "user", "content": "Give me a JSON object with name and age for Anna, 30."}]
    with _client(url) as client:
        answer = client.chat.completions.parse(model="tgi", messages=anna, temperature=0, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Anna", age=30)


def test_tools(url: str) -> None:
    paris: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    with _client(url) as client:
        answer = client.chat.completions.parse(
            model="tgi", messages=paris, temperature=0, tool_choice="required",
            tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
        )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(location="Paris")


def test_overload(busy_url: str) -> None:
    with _client(busy_url) as client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tgi", messages=HELLO)


def test_errors(url: str, faulty_url: str, key: str) -> None:
    broken: Any = [{"role": "user", "content": "break down"}]
    for kind, base, token, options in (
        (openai.BadRequestError, url, "-", {"messages": HELLO, "temperature": -1}),
        (openai.AuthenticationError, faulty_url, "wrong", {"messages": HELLO}),
        (openai.APIStatusError, faulty_url, key, {"messages": broken}),
    ):
        with _client(base, token) as client, pytest.raises(kind) as caught:
            client.chat.completions.create(model="tgi", **options)
        assert type(caught.value) is kind
    with _client(faulty_url, key) as client, pytest.raises(openai.APIError, match="out of memory"):
        list(client.chat.completions.create(model="tgi", messages=broken, stream=True))
