"""openai-agents: chat completions and responses; typed answers, tools, hand-offs, streams, a full context."""

from __future__ import annotations

import openai
import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from agents.models.interface import Model
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

HELLO = "Hello! What is 2 plus 3?"
HELLO_BACK = "Hello! 2 plus 3 is 5."
ANNA = "Give me a JSON object with name and age for Anna, 30."
PARIS = "What is the weather in Paris?"
GREEDY = ModelSettings(temperature=0, max_tokens=60)
QUIET = RunConfig(tracing_disabled=True)


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def model(request: pytest.FixtureRequest, url: str) -> Model:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    return request.param("tgi", openai_client=client)


def _agent(model: Model, **options: object) -> Agent:
    return Agent("Helper", model=model, model_settings=GREEDY, **options)


async def test_text(model: Model) -> None:
    assert (await Runner.run(_agent(model), HELLO, run_config=QUIET)).final_output == HELLO_BACK


async def test_a_stream(model: Model) -> None:
    stream = Runner.run_streamed(_agent(model), HELLO, run_config=QUIET)
    texts = []
    async for event in stream.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            texts.append(event.data.delta)
    assert "".join(texts) == stream.final_output == HELLO_BACK


async def test_a_typed_answer(model: Model) -> None:
    answer = await Runner.run(_agent(model, output_type=Person), ANNA, run_config=QUIET)
    assert answer.final_output == Person(name="Anna", age=30)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool(model: Model, streamed: bool) -> None:
    """Its result is the answer: the demo model would call again."""
    places = []

    @function_tool
    def get_weather(location: str) -> str:
        """Get the current weather"""
        places.append(location)
        return f"sunny in {location}"

    agent = _agent(model, tools=[get_weather], tool_use_behavior="stop_on_first_tool")
    if streamed:
        run = Runner.run_streamed(agent, PARIS, run_config=QUIET)
        async for _ in run.stream_events():
            pass
        assert run.final_output == "sunny in Paris"
    else:
        assert (await Runner.run(agent, PARIS, run_config=QUIET)).final_output == "sunny in Paris"
        again = _agent(model, tools=[get_weather])
        again.reset_tool_choice = False
        with pytest.raises(MaxTurnsExceeded):
            await Runner.run(again, PARIS, max_turns=2, run_config=QUIET)
    assert set(places) == {"Paris"}


async def test_a_full_context_is_recognised(model: Model) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await Runner.run(_agent(model), "Hello " * 6000, run_config=QUIET)
    assert caught.value.code == "context_length_exceeded"
