"""langchain-openai: the chat model, its structured outputs and tools, the legacy completion model, and agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

HELLO_BACK = "Hello! 2 plus 3 is 5."
ANNA = "Give me a JSON object with name and age for Anna, 30."


class Person(BaseModel):
    """A person"""

    name: str
    age: int


@tool
def get_weather(location: str) -> str:
    """Get the current weather"""
    return f"sunny in {location}"


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="-", model="tgi", temperature=0, max_retries=0, max_tokens=60)  # type: ignore[call-arg]


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke("Hello! What is 2 plus 3?")
    assert answer.content == HELLO_BACK and answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 5
    answer = chat.invoke([SystemMessage("Answer with one word."), HumanMessage("What is the capital of Spain?")])
    assert str(answer.content).rstrip(".") == "Madrid"


async def test_stream(chat: ChatOpenAI) -> None:
    assert "".join(str(piece.content) for piece in chat.stream("Hello! What is 2 plus 3?")) == HELLO_BACK
    pieces = [piece async for piece in chat.astream("Hello! What is 2 plus 3?")]
    assert "".join(str(piece.content) for piece in pieces) == HELLO_BACK


def test_batch_and_stop(chat: ChatOpenAI) -> None:
    answers = chat.batch(["What is 12 + 7?", "What color is grass?"])
    assert "19" in answers[0].content and "green" in answers[1].content
    assert chat.invoke("Count to 10.", stop=[", 5"]).content == "1, 2, 3, 4"


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Any) -> None:
    assert chat.with_structured_output(Person, method=method).invoke(ANNA) == Person(name="Anna", age=30)


def test_tools(chat: ChatOpenAI) -> None:
    question = HumanMessage("What is the weather in Paris?")
    first = chat.bind_tools([get_weather]).invoke([question])
    assert isinstance(first, AIMessage)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"location": "Paris"}) and call["id"]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    second = chat.bind_tools([get_weather], tool_choice="none").invoke([question, first, result])
    assert second.content and not second.tool_calls


def test_streamed_tools(chat: ChatOpenAI) -> None:
    whole: Any = None
    for piece in chat.bind_tools([get_weather], tool_choice="any").stream("What is the weather in Paris?"):
        whole = piece if whole is None else whole + piece
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"location": "Paris"})


@wrap_model_call
def words_after_a_result(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """The demo model would call again."""
    has_result = isinstance(request.messages[-1], ToolMessage)
    return handler(request.override(tool_choice="none") if has_result else request)


QUESTION: Any = {"messages": [HumanMessage("What is the weather in Paris?")]}
LIMITS: Any = {"recursion_limit": 6}


def test_agent(chat: ChatOpenAI) -> None:
    agent = create_agent(chat, [get_weather], middleware=[words_after_a_result])
    _, first, result, last = agent.invoke(QUESTION, LIMITS)["messages"]
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("get_weather", {"location": "Paris"})]
    assert result.content == "sunny in Paris" and result.tool_call_id == first.tool_calls[0]["id"]
    assert last.content and not last.tool_calls
    streamed = [piece for piece, _ in agent.stream(QUESTION, LIMITS, stream_mode="messages")]
    words = [str(piece.content) for piece in streamed[streamed.index(_result(streamed)) + 1 :]]
    assert "".join(words) == last.content


def _result(messages: list[Any]) -> Any:
    return next(message for message in messages if isinstance(message, ToolMessage))


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
def test_agent_with_a_structured_answer(chat: ChatOpenAI, strategy: Any) -> None:
    agent = create_agent(chat, [], response_format=strategy(Person))
    answer = agent.invoke({"messages": [HumanMessage(ANNA)]}, LIMITS)
    assert answer["structured_response"] == Person(name="Anna", age=30)


def test_logprobs(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True).invoke("Hello! What is 2 plus 3?")
    assert "".join(one["token"] for one in answer.response_metadata["logprobs"]["content"]).startswith(HELLO_BACK)


def test_legacy_completions(url: str) -> None:
    model = OpenAI(base_url=f"{url}/v1", api_key="-", model="tgi", max_tokens=8, temperature=0, max_retries=0)  # type: ignore[call-arg]
    assert model.invoke("The capital of France is").startswith(" Paris")
    assert "".join(model.stream("The capital of France is")).startswith(" Paris")


def _asked(base: str, **options: Any) -> None:
    ChatOpenAI(base_url=f"{base}/v1", api_key="-", model="tgi", max_retries=0, **options).invoke("Hello")  # type: ignore[call-arg]


def test_errors(url: str, faulty_url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        _asked(url, temperature=-1)
    with pytest.raises(openai.AuthenticationError):
        _asked(faulty_url)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_full_context_is_recognised(chat: ChatOpenAI, api: str) -> None:
    """Middleware that summarizes a conversation waits for this exception."""
    asked = chat.model_copy(update={"use_responses_api": api == "responses"})
    with pytest.raises(ContextOverflowError):
        asked.invoke("Hello " * 6000)
    with pytest.raises(ContextOverflowError):
        list(asked.stream("Hello " * 6000))


def test_overload(busy_url: str) -> None:
    with pytest.raises(openai.RateLimitError):
        _asked(busy_url)
