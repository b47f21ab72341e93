"""Tools with the demo model, which was trained to call them, through unmodified clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient
from support.running_server import RunningServer

pytestmark = pytest.mark.e2e


def tool(name: str, description: str, properties: dict[str, Any]) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


UNITS = {"type": "string", "enum": ["celsius", "fahrenheit"]}
WEATHER = tool(
    "get_weather", "Get the current weather", {"location": {"type": "string", "description": "The city"}, "unit": UNITS}
)
TIMER = tool("set_timer", "Start a timer", {"minutes": {"type": "integer", "description": "Minutes"}})
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
PARIS = {"location": "Paris", "unit": "celsius"}


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as opened:
        yield opened


def ask(client: openai.OpenAI, *messages: Any, **fields: Any) -> Any:
    given: Any = {"tools": [WEATHER, TIMER], "temperature": 0, "max_tokens": 100} | fields
    return client.chat.completions.create(model="tgi", messages=list(messages) or [QUESTION], **given)


@pytest.mark.parametrize(
    "choice",
    [None, "auto", "required", "get_weather", {"type": "function", "function": {"name": "get_weather"}}],
)
def test_a_call(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(client, tool_choice=choice)
    (got,) = answer.choices
    (call,) = got.message.tool_calls
    assert got.finish_reason == "tool_calls" and got.message.content is None
    assert call.type == "function" and call.id.startswith("call_") and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == PARIS
    assert list(json.loads(call.function.arguments)) == ["location", "unit"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_other_function(client: openai.OpenAI) -> None:
    request = {"role": "user", "content": "Set a timer for 12 minutes."}
    (call,) = ask(client, request).choices[0].message.tool_calls
    assert call.function.name == "set_timer" and json.loads(call.function.arguments) == {"minutes": 12}
    named = ask(client, tool_choice="set_timer").choices[0].message.tool_calls
    assert named[0].function.name == "set_timer" and isinstance(json.loads(named[0].function.arguments)["minutes"], int)


def test_words_where_no_function_fits(client: openai.OpenAI) -> None:
    question: Any = {"role": "user", "content": "What is the capital of France?"}
    with_tools = ask(client, question)
    plain = client.chat.completions.create(model="tgi", messages=[question], temperature=0, max_tokens=100)
    assert with_tools.choices[0].message == plain.choices[0].message
    assert with_tools.choices[0].finish_reason == "stop" and with_tools.choices[0].message.tool_calls is None
    assert "Paris" in with_tools.choices[0].message.content
    assert with_tools.usage.total_tokens == plain.usage.total_tokens
    assert ask(client, question, tool_choice="none").choices[0].message == plain.choices[0].message


def test_the_answer_from_a_result(client: openai.OpenAI) -> None:
    first = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "21 degrees and sunny"}
    answer = ask(client, QUESTION, first.model_dump(exclude_none=True), result, tool_choice="none")
    assert "21" in answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
def test_a_stream_gives_the_same_call(client: openai.OpenAI, choice: str) -> None:
    chunks = list(ask(client, tool_choice=choice, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [bool(call.id) for call in calls] == [True] + [False] * (len(calls) - 1)
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert calls[0].function.name == "get_weather" and len(calls) > 2
    text = "".join(call.function.arguments for call in calls)
    whole = ask(client, tool_choice=choice)
    assert text == whole.choices[0].message.tool_calls[0].function.arguments
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens and not chunks[-1].choices


def test_words_in_a_stream(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    chunks = list(ask(client, question, stream=True))
    assert all(chunk.choices[0].delta.tool_calls is None for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ask(client, question).choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_streaming_helper_of_openai(client: openai.OpenAI) -> None:
    given: Any = {"messages": [QUESTION], "tools": [WEATHER, TIMER], "tool_choice": "auto"}
    with client.chat.completions.stream(model="tgi", temperature=0, max_tokens=100, **given) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == PARIS
    assert final.choices[0].finish_reason == "tool_calls" and final.choices[0].message.role == "assistant"


def test_huggingface_hub(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # it refuses the loopback too
    client = InferenceClient(base_url=server.url)
    given: Any = {"messages": [QUESTION], "tools": [WEATHER, TIMER], "tool_choice": "auto", "max_tokens": 100}
    answer = client.chat_completion(**given, temperature=0)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == PARIS
    deltas = [chunk.choices[0].delta for chunk in client.chat_completion(**given, temperature=0, stream=True)]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert calls[0].function.name == "get_weather"
    assert json.loads("".join(call.function.arguments for call in calls)) == PARIS


def test_whatever_is_drawn_is_a_call(client: openai.OpenAI) -> None:
    shape = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["x"]}
    parameters = {
        "type": "object",
        "properties": {"points": {"type": "array", "items": {"$ref": "#/$defs/P"}, "maxItems": 2, "minItems": 1}},
        "required": ["points"],
        "$defs": {"P": shape},
    }
    draw = {"type": "function", "function": {"name": "draw", "parameters": parameters, "strict": True}}
    for seed in range(4):
        answer = ask(client, tools=[draw], tool_choice="required", temperature=1.5, seed=seed, n=2)
        for choice in answer.choices:
            (call,) = choice.message.tool_calls
            points = json.loads(call.function.arguments)["points"]
            assert 1 <= len(points) <= 2 and all(0 <= point["x"] <= 99 for point in points)
            assert choice.finish_reason == "tool_calls"


def test_a_cut_call_says_so(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice="get_weather", max_tokens=12).choices
    assert choice.finish_reason == "length" and choice.message.tool_calls[0].function.name == "get_weather"


def test_front_doors_and_refusals(server: RunningServer) -> None:
    body: dict[str, Any] = {"messages": [QUESTION], "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        by_sagemaker = client.post("/invocations", json=body).json()
        assert by_sagemaker["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        rendered = client.post("/chat_tokenize", json=body).json()["templated_text"]
        assert "get_weather" in rendered and "no_tool" not in rendered
        (predicted,) = client.post("/vertex", json={"instances": [body | {"tool_choice": "required"}]}).json()[
            "predictions"
        ]
        assert json.loads(predicted) == {"function": {"_name": "get_weather", **PARIS}}
        both = client.post("/v1/chat/completions", json=body | {"response_format": {"type": "json_object"}}).json()
        assert both["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        words = body | {"messages": [{"role": "user", "content": "Hello!"}], "response_format": {"type": "json_object"}}
        message = client.post("/v1/chat/completions", json=words).json()["choices"][0]["message"]
        assert "tool_calls" not in message and message["content"].lstrip().startswith("{")
