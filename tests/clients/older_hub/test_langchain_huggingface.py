"""langchain-huggingface: the text model on TGI's route, and the chat model with tools and structured output."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError, OverloadedError, ValidationError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

COUNT = "1, 2, 3, 4, 5,"
HELLO_BACK = "Hello! 2 plus 3 is 5."
PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@tool
def get_weather(location: str) -> str:
    """Get the current weather"""
    return f"sunny in {location}"


def _endpoint(url: str, **options: Any) -> HuggingFaceEndpoint:
    defaults = {"max_new_tokens": 12, "temperature": 0.01, "top_p": 0.95, "typical_p": 0.95, "seed": 1}
    return HuggingFaceEndpoint(endpoint_url=url, task="text-generation", **(defaults | options))


@pytest.fixture
def chat(url: str) -> ChatHuggingFace:
    return ChatHuggingFace(llm=_endpoint(url, max_new_tokens=60), model_id="demo", temperature=0.0, max_tokens=60)


async def test_text(url: str) -> None:
    assert _endpoint(url).invoke("The capital of France is").startswith(" Paris")
    assert (await _endpoint(url).ainvoke(COUNT)).startswith(" 6, 7")


def test_text_with_a_stop(url: str) -> None:
    assert _endpoint(url, max_new_tokens=40, stop_sequences=[" 8"]).invoke(COUNT) == " 6, 7,"
    assert _endpoint(url, max_new_tokens=40).invoke(COUNT, stop=[" 8"]) == " 6, 7,"


async def test_streamed_text(url: str) -> None:
    whole = _endpoint(url).invoke(COUNT)
    assert "".join(_endpoint(url).stream(COUNT)) == whole
    assert "".join([piece async for piece in _endpoint(url).astream(COUNT)]) == whole
    assert _endpoint(url, streaming=True).invoke(COUNT) == whole


async def test_chat(chat: ChatHuggingFace) -> None:
    answer = chat.invoke("Hello! What is 2 plus 3?")
    assert answer.content == HELLO_BACK
    assert answer.response_metadata["finish_reason"] == "stop" and answer.usage_metadata["output_tokens"] > 5
    messages = [SystemMessage("Answer with one word."), HumanMessage("What is the capital of Spain?")]
    assert str((await chat.ainvoke(messages)).content).rstrip(".") == "Madrid"


async def test_streamed_chat(chat: ChatHuggingFace) -> None:
    assert "".join(str(piece.content) for piece in chat.stream("Hello! What is 2 plus 3?")) == HELLO_BACK
    pieces = [piece async for piece in chat.astream("Hello! What is 2 plus 3?")]
    assert "".join(str(piece.content) for piece in pieces) == HELLO_BACK


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
def test_tools(chat: ChatHuggingFace, choice: str) -> None:
    answer = chat.bind_tools([get_weather], tool_choice=choice).invoke("What is the weather in Paris?")
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"location": "Paris"})


def test_tool_round_trip(chat: ChatHuggingFace) -> None:
    question = HumanMessage("What is the weather in Paris?")
    first = chat.bind_tools([get_weather], tool_choice="required").invoke([question])
    assert isinstance(first, AIMessage)
    call = first.tool_calls[0]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    second = chat.bind_tools([get_weather], tool_choice="none").invoke([question, first, result])
    assert second.content


def test_structured_output(chat: ChatHuggingFace) -> None:
    question = "Give me a JSON object with name and age for Anna, 30."
    anna = {"name": "Anna", "age": 30}
    assert chat.with_structured_output(PERSON, method="json_schema").invoke(question) == anna
    assert chat.with_structured_output(PERSON, method="json_mode").invoke(question) == anna


def test_errors(busy_url: str, faulty_url: str) -> None:
    with pytest.raises(OverloadedError, match="Model is overloaded"):
        _endpoint(busy_url).invoke("Hello")
    with pytest.raises(HfHubHTTPError, match="Model is overloaded"):
        ChatHuggingFace(llm=_endpoint(busy_url), model_id="demo").invoke("Hello")
    with pytest.raises(HfHubHTTPError, match="API key"):
        ChatHuggingFace(llm=_endpoint(faulty_url), model_id="demo").invoke("Hello")


def test_validation(url: str) -> None:
    with pytest.raises(ValidationError, match="`temperature` must be > 0"):
        _endpoint(url, temperature=-1.0).invoke("Hello")
    with pytest.raises(ValidationError, match="`temperature` must be > 0"):
        list(_endpoint(url, temperature=-1.0).stream("Hello"))


def test_failure_with_a_key(faulty_url: str, key: str) -> None:
    options = {"server_kwargs": {"headers": {"authorization": f"Bearer {key}"}}}
    assert _endpoint(faulty_url, **options).invoke("Hello") == "one two"
    with pytest.raises(Exception, match="out of memory") as caught:
        _endpoint(faulty_url, **options).invoke("break down")
    assert type(caught.value).__name__ == "GenerationError"
