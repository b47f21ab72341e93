"""text-generation 0.7, TGI's own client: generate, streams, chat, sync and async, and its exceptions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from text_generation import AsyncClient, Client
from text_generation.errors import (
    GenerationError,
    IncompleteGenerationError,
    OverloadedError,
    UnknownError,
    ValidationError,
)
from text_generation.types import FinishReason, Grammar, GrammarType, Message, Tool

COUNT = "1, 2, 3, 4, 5,"
HELLO = [Message(role="user", content="Hello! What is 2 plus 3?")]
HELLO_BACK = "Hello! 2 plus 3 is 5."
PARIS = [Message(role="user", content="What is the weather in Paris?")]
WEATHER = Tool(
    type="function",
    function={
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "The city"}},
            "required": ["location"],
        },
    },
)


@pytest.fixture
def client(url: str) -> Client:
    return Client(url, timeout=60)


def test_generate(client: Client) -> None:
    answer = client.generate("The capital of France is", max_new_tokens=8)
    assert answer.generated_text == " Paris."
    details = answer.details
    assert details.finish_reason == FinishReason.EndOfSequenceToken and details.tokens[-1].special
    assert details.generated_tokens == len(details.tokens) and details.seed is None and details.prefill == []


def test_generate_details(client: Client) -> None:
    answer = client.generate(COUNT, max_new_tokens=4, decoder_input_details=True, top_n_tokens=2)
    assert answer.generated_text.startswith(" 6,") and answer.details.finish_reason == FinishReason.Length
    assert answer.details.prefill[0].logprob is None
    assert "".join(token.text for token in answer.details.prefill).endswith(COUNT)
    assert [len(tokens) for tokens in answer.details.top_tokens] == [2] * 4
    assert client.generate(COUNT, max_new_tokens=4, return_full_text=True).generated_text.startswith(f"{COUNT} 6,")


def test_generate_samples(client: Client) -> None:
    def sampled() -> str:
        return client.generate(
            "Once upon a time", do_sample=True, temperature=1.5, top_k=40, top_p=0.95, typical_p=0.95, seed=3,
            repetition_penalty=1.1, frequency_penalty=0.1, truncate=10, stop_sequences=["zzz"],
        ).generated_text  # fmt: skip

    assert sampled() == sampled()
    best = client.generate("Once upon a time", do_sample=True, temperature=1.5, best_of=2)
    assert len(best.details.best_of_sequences) == 1


def test_generate_stops(client: Client) -> None:
    answer = client.generate(COUNT, max_new_tokens=40, stop_sequences=[" 8"])
    assert answer.generated_text.endswith("6, 7, 8") and answer.details.finish_reason == FinishReason.StopSequence


def test_generate_stream(client: Client) -> None:
    events = list(client.generate_stream(COUNT, max_new_tokens=10, top_n_tokens=2))
    assert "".join(event.token.text for event in events) == events[-1].generated_text
    assert events[-1].generated_text == client.generate(COUNT, max_new_tokens=10).generated_text
    assert events[-1].details.finish_reason == FinishReason.Length and events[-1].details.generated_tokens == 10
    assert all(event.details is None for event in events[:-1])
    assert all(len(event.top_tokens) == 2 for event in events)


def test_grammar(client: Client) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    answer = client.generate("As JSON: ", max_new_tokens=40, grammar=Grammar(type=GrammarType.Json, value=schema))
    assert list(json.loads(answer.generated_text)) == ["age"]
    answer = client.generate("A number: ", grammar=Grammar(type=GrammarType.Regex, value="[0-9]{4}"))
    assert len(answer.generated_text) == 4 and answer.generated_text.isdigit()


def test_chat(client: Client) -> None:
    answer = client.chat(messages=HELLO, temperature=0.0, max_tokens=40)
    assert answer.choices[0].message.content == HELLO_BACK and answer.choices[0].finish_reason == "stop"
    assert answer.usage["completion_tokens"] > 5 and answer.system_fingerprint
    answer = client.chat(messages=HELLO, seed=4, logprobs=True, top_logprobs=2, max_tokens=5, top_p=0.9)
    assert len(answer.choices[0].logprobs["content"]) == 5


@pytest.mark.parametrize("choice", ["auto", "get_weather"])
def test_chat_tools(client: Client, choice: str) -> None:
    answer = client.chat(messages=PARIS, tools=[WEATHER], tool_choice=choice, temperature=0.0, max_tokens=60)
    (call,) = answer.choices[0].message.tool_calls
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"location": "Paris"}


async def test_async_overload(busy_url: str) -> None:
    with pytest.raises(OverloadedError):
        await AsyncClient(busy_url).generate("Hello")


async def test_async_forms(url: str) -> None:
    client = AsyncClient(url, timeout=60)
    whole = await client.generate(COUNT, max_new_tokens=10)
    assert whole.generated_text.startswith(" 6, 7")
    events = [event async for event in client.generate_stream(COUNT, max_new_tokens=10)]
    assert events[-1].generated_text == whole.generated_text
    answer = await client.chat(messages=HELLO, temperature=0.0, max_tokens=40)
    assert answer.choices[0].message.content == HELLO_BACK
    # The client itself refuses most wrong values; `inputs` it does not look at.
    with pytest.raises(ValidationError, match="must be <="):
        await client.generate("Hello " * 6000)
    with pytest.raises(ValidationError, match="must be <="):
        _ = [event async for event in client.generate_stream("Hello " * 6000)]


@pytest.mark.parametrize("stream", [False, True])
def test_overload(busy_url: str, stream: bool) -> None:
    client = Client(busy_url, timeout=60)

    def asked(prompt: str) -> Any:
        return list(client.generate_stream(prompt)) if stream else client.generate(prompt)

    with pytest.raises(OverloadedError, match="Model is overloaded"):
        asked("Hello")


@pytest.mark.parametrize("stream", [False, True])
def test_validation(client: Client, stream: bool) -> None:
    def asked(prompt: str, **parameters: Any) -> Any:
        function = client.generate_stream if stream else client.generate
        return list(function(prompt, **parameters))

    with pytest.raises(ValidationError, match="must be <= 4096"):
        asked("Hello " * 6000)
    with pytest.raises(ValidationError, match="`stop` supports up to 4"):
        asked("Hello", stop_sequences=["a"] * 5)


@pytest.mark.parametrize("stream", [False, True])
def test_failures(faulty_url: str, key: str, stream: bool) -> None:
    client = Client(faulty_url, headers={"authorization": f"Bearer {key}"})

    def asked(prompt: str) -> Any:
        return list(client.generate_stream(prompt)) if stream else client.generate(prompt)

    with pytest.raises(GenerationError, match="out of memory"):
        asked("break down")
    with pytest.raises(UnknownError if stream else IncompleteGenerationError, match="Incomplete generation"):
        asked("stop short")
    with pytest.raises(UnknownError, match="API key"):
        Client(faulty_url).generate("Hello")
