"""anthropic-python: messages at once and streamed, tools, tokens, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = {"temperature": 0}
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Get the current weather",
        "input_schema": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "The city"}},
            "required": ["location"],
        },
    }
]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as opened:
        yield opened


def test_a_message(client: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello! What is 2 plus 3?"}]}]
    message = client.messages.create(model="tgi", max_tokens=20, messages=asked, system="You are brief.")
    assert message.type == "message" and message.role == "assistant" and message.content[0].type == "text"
    counted = client.messages.count_tokens(model="tgi", messages=asked, system="You are brief.")
    assert message.usage.input_tokens == counted.input_tokens > 0 and message.usage.output_tokens > 0


def test_a_stream_adds_up_to_the_message(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tgi", "max_tokens": 20, "messages": [{"role": "user", "content": "Hello!"}]}
    whole = client.messages.create(**asked, extra_body=GREEDY)
    with client.messages.stream(**asked, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text == streamed.content[0].text
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)


def test_a_round_with_a_tool(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tgi", "max_tokens": 60, "tools": TOOLS, "extra_body": GREEDY}
    whole = client.messages.create(messages=PARIS, **asked)
    with client.messages.stream(messages=PARIS, **asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (block,) = message.content
        assert message.stop_reason == "tool_use" and block.type == "tool_use"
        assert (block.name, block.input) == ("get_weather", {"location": "Paris"})
    call = whole.content[0]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
    turns: Any = [*PARIS, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=turns, tool_choice={"type": "none"}, **asked)
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.content[0].type == "text"


def test_a_server_without_a_free_place(client: anthropic.Anthropic, busy_url: str) -> None:
    with pytest.raises(anthropic.RateLimitError) as refused:
        client.messages.create(model="tgi", max_tokens=5, messages=PARIS)
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_errors(client: anthropic.Anthropic, faulty_url: str, key: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        client.messages.create(model="tgi", max_tokens=5, messages=PARIS, extra_body={"top_p": 2.0})
    with (
        anthropic.Anthropic(base_url=faulty_url, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(model="tgi", max_tokens=5, messages=PARIS)
    broken: Any = [{"role": "user", "content": "break down"}]
    with (
        anthropic.Anthropic(base_url=faulty_url, api_key=key, max_retries=0) as other,
        pytest.raises(anthropic.InternalServerError),
    ):
        other.messages.create(model="tgi", max_tokens=5, messages=broken)
