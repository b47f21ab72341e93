"""pydantic-ai: chat completions, responses and messages; typed answers, tools, streams, a full context."""

from __future__ import annotations

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelHTTPError, UsageLimitExceeded
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

HELLO = "Hello! What is 2 plus 3?"
HELLO_BACK = "Hello! 2 plus 3 is 5."
ANNA = "Give me a JSON object with name and age for Anna, 30."
GREEDY = ModelSettings(temperature=0, max_tokens=60)


class Person(BaseModel):
    """A person"""

    name: str
    age: int


def _model(api: str, url: str) -> Model:
    if api == "messages":
        return AnthropicModel("tgi", provider=AnthropicProvider(base_url=url, api_key="-"))
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind("tgi", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="-"))


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request: pytest.FixtureRequest, url: str) -> Model:
    return _model(request.param, url)


async def test_text(model: Model) -> None:
    answer = await Agent(model, model_settings=GREEDY).run(HELLO)
    assert answer.output == HELLO_BACK and answer.usage.output_tokens > 5
    one_word = Agent(model, model_settings=GREEDY, instructions="Answer with one word.")
    assert (await one_word.run("What is the capital of Spain?")).output.rstrip(".") == "Madrid"


async def test_a_stream(model: Model) -> None:
    async with Agent(model, model_settings=GREEDY).run_stream(HELLO) as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)]) == HELLO_BACK
        assert stream.usage.output_tokens > 5


async def test_a_typed_answer(model: Model) -> None:
    """The agent forces a call, or asks for the schema; pydantic-ai has no schemas for models of messages."""
    kinds = [Person, ToolOutput(Person)] + ([] if isinstance(model, AnthropicModel) else [NativeOutput(Person)])
    for kind in kinds:
        agent = Agent(model, model_settings=GREEDY, output_type=kind, retries=0)
        assert (await agent.run(ANNA)).output == Person(name="Anna", age=30)


async def test_tools(model: Model) -> None:
    """The demo model calls again with each result, until the limit of requests."""
    places = []
    agent = Agent(model, model_settings=GREEDY)

    @agent.tool_plain
    def get_weather(location: str) -> str:
        """Get the current weather"""
        places.append(location)
        return "18 degrees, sunny"

    with pytest.raises(UsageLimitExceeded):
        await agent.run("What is the weather in Paris?", usage_limits=UsageLimits(request_limit=2))
    assert places == ["Paris", "Paris"]


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_schema_beside_tools(url: str, api: str) -> None:
    """The model may call although the request has a schema for what it says."""
    places = []
    agent = Agent(_model(api, url), model_settings=GREEDY, output_type=NativeOutput(Person), retries=0)

    @agent.tool_plain
    def get_weather(location: str) -> str:
        """Get the current weather"""
        places.append(location)
        return "18 degrees, sunny"

    with pytest.raises(UsageLimitExceeded):
        await agent.run("What is the weather in Paris?", usage_limits=UsageLimits(request_limit=1))
    assert places == ["Paris"]


async def test_a_full_context_is_recognised(model: Model) -> None:
    """Agents shorten the conversation then; on other errors they give up."""
    with pytest.raises(ModelHTTPError) as caught:
        await Agent(model, model_settings=GREEDY).run("Hello " * 6000)
    assert isinstance(caught.value, ModelContextWindowExceededError) and caught.value.status_code == 400


async def test_failures(faulty_url: str, key: str) -> None:
    provider = OpenAIProvider(base_url=f"{faulty_url}/v1", api_key=key)
    with pytest.raises(ModelHTTPError, match="out of memory") as caught:
        await Agent(OpenAIChatModel("tgi", provider=provider)).run("break down")
    assert caught.value.status_code == 500
    with pytest.raises(ModelHTTPError) as caught:
        await Agent(_model("chat", faulty_url)).run("Hello")
    assert caught.value.status_code == 401
