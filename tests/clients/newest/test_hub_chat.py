"""huggingface_hub 2: `chat_completion`, streams, tools and response formats, sync and async."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

HELLO = [{"role": "user", "content": "Hello! What is 2 plus 3?"}]
HELLO_BACK = "Hello! 2 plus 3 is 5."
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
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
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ANNA = [{"role": "user", "content": "Give me a JSON object with name and age for Anna, 30."}]


@pytest.fixture
def client(url: str) -> InferenceClient:
    return InferenceClient(base_url=url)


@pytest.mark.parametrize("end", ["", "/v1", "/v1/", "/v1/chat/completions"])
def test_answer(url: str, end: str) -> None:
    answer = InferenceClient(base_url=url + end).chat_completion(HELLO, max_tokens=40, temperature=0.0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content == HELLO_BACK
    assert choice.finish_reason == "stop"
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    assert answer.id and answer.created > 0


def test_system_prompt_and_history(client: InferenceClient) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "My name is Clara."}]},
        {"role": "assistant", "content": "Nice to meet you, Clara!"},
        {"role": "user", "content": "What is my name?"},
    ]
    assert "Clara" in client.chat_completion(messages, max_tokens=40, temperature=0.0).choices[0].message.content
    short = [
        {"role": "system", "content": "Answer with one word."},
        {"role": "user", "content": "What is the capital of Spain?"},
    ]
    answer = client.chat_completion(short, max_tokens=20, temperature=0.0).choices[0].message.content
    assert answer.rstrip(".") == "Madrid"


def test_stream(client: InferenceClient) -> None:
    chunks = list(
        client.chat_completion(
            HELLO, max_tokens=40, temperature=0.0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HELLO_BACK
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_logprobs(client: InferenceClient) -> None:
    answer = client.chat_completion(HELLO, max_tokens=4, temperature=0.0, logprobs=True, top_logprobs=2)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 4 and all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content


def test_all_parameters(client: InferenceClient) -> None:
    def asked() -> str:
        return client.chat_completion(
            HELLO, max_tokens=10, temperature=0.9, top_p=0.9, frequency_penalty=0.2, presence_penalty=0.2, seed=3,
            stop=["zzz"], model="some/other-name",
        ).choices[0].message.content  # fmt: skip

    assert asked() == asked()


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {"type": "json_object", "value": PERSON},
        {"type": "json", "value": PERSON},
        {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}},
    ],
)
def test_response_format(client: InferenceClient, response_format: Any) -> None:
    answer = client.chat_completion(ANNA, max_tokens=60, temperature=0.0, response_format=response_format)
    assert json.loads(answer.choices[0].message.content) == {"name": "Anna", "age": 30}


@pytest.mark.parametrize(
    "choice", ["auto", "required", "get_weather", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_tools(client: InferenceClient, choice: Any) -> None:
    answer = client.chat_completion(PARIS, tools=[WEATHER], tool_choice=choice, max_tokens=60, temperature=0.0)
    call = answer.choices[0].message.tool_calls[0]
    assert call.type == "function" and call.id and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"location": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_no_tool(client: InferenceClient) -> None:
    for options in ({"tools": [WEATHER], "tool_choice": "auto"}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = client.chat_completion(HELLO, max_tokens=40, temperature=0.0, **options)
        assert not answer.choices[0].message.tool_calls and "5" in answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"


def test_streamed_tools(client: InferenceClient) -> None:
    chunks = list(
        client.chat_completion(
            PARIS, tools=[WEATHER], tool_choice="required", max_tokens=60, temperature=0.0, stream=True
        )
    )
    deltas = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "get_weather" and deltas[0].id
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == {"location": "Paris"}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"


def test_tool_round_trip(client: InferenceClient) -> None:
    first = client.chat_completion(PARIS, tools=[WEATHER], tool_choice="required", max_tokens=60, temperature=0.0)
    call = first.choices[0].message.tool_calls[0]
    messages = [
        *PARIS,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "clear"}'},
    ]
    answer = client.chat_completion(messages, tools=[WEATHER], tool_choice="none", max_tokens=60, temperature=0.0)
    assert answer.choices[0].message.content


async def test_async_chat(url: str) -> None:
    async with AsyncInferenceClient(base_url=url) as client:
        answer = await client.chat_completion(HELLO, max_tokens=40, temperature=0.0)
        assert answer.choices[0].message.content == HELLO_BACK
        stream = await client.chat_completion(HELLO, max_tokens=40, temperature=0.0, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == HELLO_BACK
        answer = await client.chat_completion(
            PARIS, tools=[WEATHER], tool_choice="required", max_tokens=60, temperature=0.0
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
