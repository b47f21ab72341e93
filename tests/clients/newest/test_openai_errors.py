"""openai 3: every error of the server arrives as the exception that it is."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

HELLO: Any = [{"role": "user", "content": "Hello"}]
BREAK_DOWN: Any = [{"role": "user", "content": "break down"}]
STOP_SHORT: Any = [{"role": "user", "content": "stop short"}]


def _client(url: str, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "decimal_below_min_value"),
        ({"top_p": 2}, "top_p", "decimal_above_max_value"),
        ({"n": 9}, "n", "integer_above_max_value"),
        ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
        ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({"extra_body": {"max_tokens": "20"}}, "max_tokens", "invalid_type"),
        ({"messages": [{"role": "user", "content": "Hello " * 6000}]}, "messages", "context_length_exceeded"),
    ],
)
def test_invalid(url: str, options: Any, param: str, code: str, stream: bool) -> None:
    with _client(url) as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tgi", "messages": HELLO, "stream": stream, **options})
    error = caught.value
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert f"`{param}`" in error.message or f"{param}: " in error.message
    assert error.request_id == error.response.headers["x-request-id"]


def test_completion_refusals(url: str) -> None:
    with _client(url) as client:
        for options, kind in (
            ({"prompt": ["a"] * 5}, "batch size exceeded"),
            ({"prompt": "a", "suffix": "b"}, "suffix not supported"),
            ({"prompt": "a", "temperature": -1}, "validation"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="tgi", **options)  # type: ignore[call-overload]
            assert caught.value.response.json()["error_type"] == kind


@pytest.mark.parametrize("stream", [False, True])
def test_overloaded(busy_url: str, stream: bool) -> None:
    with _client(busy_url) as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="tgi", messages=HELLO, stream=stream)
    assert (caught.value.code, caught.value.type) == ("overloaded", "rate_limit_error")
    assert "Model is overloaded" in caught.value.message
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_failures_of_generation(faulty_url: str, key: str) -> None:
    with _client(faulty_url, key) as client:
        with pytest.raises(openai.InternalServerError, match="out of memory") as caught:
            client.chat.completions.create(model="tgi", messages=BREAK_DOWN)
        assert caught.value.status_code == 500 and caught.value.response.json()["error_type"] == "generation"
        with pytest.raises(openai.InternalServerError) as incomplete:
            client.chat.completions.create(model="tgi", messages=STOP_SHORT)
        assert incomplete.value.response.json()["error_type"] == "incomplete_generation"


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_failure_in_a_stream(faulty_url: str, key: str, route: str) -> None:
    texts = []
    with _client(faulty_url, key) as client, pytest.raises(openai.APIError) as caught:
        if route == "chat":
            for chunk in client.chat.completions.create(model="tgi", messages=BREAK_DOWN, stream=True):
                texts.append(chunk.choices[0].delta.content)
        else:
            for event in client.completions.create(model="tgi", prompt="break down", stream=True):
                texts.append(event.choices[0].text)
    assert "".join(texts) == "one two"
    assert caught.value.message == "Request failed during generation: Server error: out of memory"
    assert caught.value.type == "server_error"


def test_wrong_key(faulty_url: str, key: str) -> None:
    with _client(faulty_url, "wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model="tgi", messages=HELLO)
    assert caught.value.code == "invalid_api_key"
    with _client(faulty_url, key) as client:
        assert client.chat.completions.create(model="tgi", messages=HELLO).choices[0].message.content == "one two"


def test_what_is_not_served(url: str) -> None:
    with _client(url) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.moderations.create(model="tgi", input="Hello")
        assert "/v1/chat/completions" in caught.value.message
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="tgi", input="Hello")


def test_too_large_a_body(url: str) -> None:
    with _client(url) as client, pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="tgi", prompt="a" * 2_100_000)
    assert caught.value.status_code == 413


def test_a_stream_that_is_left(url: str) -> None:
    with _client(url) as client:
        stream = client.chat.completions.create(
            model="tgi", messages=[{"role": "user", "content": "Tell me a story about a fox."}], stream=True
        )
        next(iter(stream))
        stream.close()
        assert client.completions.create(model="tgi", prompt="The sky is", max_tokens=2, temperature=0).choices[0].text


def test_a_timeout(url: str) -> None:
    with _client(url) as client, pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model="tgi", prompt="a", max_tokens=4000, extra_body={"ignore_eos": True}, timeout=httpx2.Timeout(0.2)
        )
