"""openai 3: tools, at once and streamed, with the helpers that read them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
PRODUCT: Any = [{"role": "user", "content": "Calculate 23 * 45."}]
WHO: Any = [{"role": "user", "content": "Who are you?"}]


class GetWeather(BaseModel):
    """Get the current weather"""

    location: str = Field(description="The city")


def _tool(name: str, description: str, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = _tool("get_weather", "Get the current weather", location={"type": "string", "description": "The city"})
CALCULATOR = _tool("calculator", "Evaluate an expression", expression={"type": "string"})
TOOLS = [WEATHER, CALCULATOR]
NAMED: Any = {"type": "function", "function": {"name": "calculator"}}


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("choice", ["auto", "required", None])
def test_calls(client: openai.OpenAI, choice: Any) -> None:
    options = {} if choice is None else {"tool_choice": choice}
    for messages, name, arguments in (
        (PARIS, "get_weather", {"location": "Paris"}),
        (PRODUCT, "calculator", {"expression": "23 * 45"}),
    ):
        answer = client.chat.completions.create(
            model="tgi", messages=messages, tools=TOOLS, temperature=0, max_tokens=60, **options
        )
        (call,) = answer.choices[0].message.tool_calls
        assert (call.type, call.function.name) == ("function", name) and call.id
        assert json.loads(call.function.arguments) == arguments
        assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
        assert answer.usage.completion_tokens > 5


def test_named_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tgi", messages=PARIS, tools=TOOLS, tool_choice=NAMED, temperature=0, max_tokens=60,
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "calculator" and "expression" in json.loads(call.function.arguments)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_answer_without_a_call(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="tgi", messages=WHO, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=40
    )
    assert answer.choices[0].message.content.startswith("I am the demo model of Tercet")
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_streamed_call(client: openai.OpenAI, choice: Any) -> None:
    stream = client.chat.completions.create(
        model="tgi", messages=PRODUCT, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=60, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    deltas = [call for one in choices for call in one.delta.tool_calls or []]
    first = deltas[0]
    assert first.index == 0 and first.id and first.type == "function" and first.function.name == "calculator"
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == {"expression": "23 * 45"}
    assert len(deltas) > 2, "arguments arrive in pieces"
    assert [one.finish_reason for one in choices if one.finish_reason] == ["tool_calls"]
    assert not any(one.delta.content for one in choices)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 5


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tgi", messages=PARIS, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=60
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.name for event in done] == ["get_weather"]
    (call,) = final.choices[0].message.tool_calls
    assert (
        json.loads(call.function.arguments) == {"location": "Paris"} and final.choices[0].finish_reason == "tool_calls"
    )


def test_parsed_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tgi", messages=PARIS, tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
        tool_choice="required", temperature=0, max_tokens=60,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(location="Paris")


def test_round_trip(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="tgi", messages=PARIS, tools=TOOLS, temperature=0, max_tokens=60)
    message = first.choices[0].message
    history: Any = [
        *PARIS,
        message.model_dump(),
        {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "content": '{"temperature": 21, "condition": "sunny"}',
        },
    ]
    second = client.chat.completions.create(
        model="tgi", messages=history, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=60
    )
    assert second.choices[0].message.content == "It is sunny and 21 degrees in Paris."


def test_a_call_beside_a_format_of_answers(client: openai.OpenAI) -> None:
    for choice in ("auto", "required"):
        answer = client.chat.completions.create(
            model="tgi",
            messages=PARIS,
            tools=TOOLS,
            tool_choice=choice,
            response_format={"type": "json_object"},
            temperature=0,
            max_tokens=100,
        ).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.tool_calls[0].function.name == "get_weather"


def test_unknown_tool(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tgi", messages=PARIS, tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "unknown"}},
        )  # fmt: skip
    assert caught.value.response.json()["error_type"] == "tool_error"


RESPONSES_TOOL: Any = {"type": "function", **WEATHER["function"], "strict": False}


def test_the_responses_api(client: openai.OpenAI) -> None:
    """A round: a call, whole and streamed, and the answer to its output."""
    asked: Any = {"model": "tgi", "tools": [RESPONSES_TOOL], "temperature": 0, "max_output_tokens": 60}
    whole = client.responses.create(input=PARIS, **asked)
    with client.responses.stream(input=PARIS, **asked) as stream:
        streamed = stream.get_final_response() if list(stream) else None
    for response in (whole, streamed):
        assert response is not None and response.status == "completed"
        (call,) = response.output
        assert call.type == "function_call" and json.loads(call.arguments) == {"location": "Paris"}
    call = whole.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees, sunny"}
    answer = client.responses.create(input=[*PARIS, call, result], **asked | {"tool_choice": "none"})
    assert answer.output_text and answer.output[0].type == "message"
