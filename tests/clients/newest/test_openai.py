"""openai 3: chat and completions, at once and streamed, models; content and counts."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

HELLO: Any = [{"role": "user", "content": "Hello! What is 2 plus 3?"}]
HELLO_BACK = "Hello! 2 plus 3 is 5."
ANNA: Any = [{"role": "user", "content": "Give me a JSON object with name and age for Anna, 30."}]


class Person(BaseModel):
    name: str
    age: int


class Colour(BaseModel):
    colour: Literal["red", "green", "blue"]


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as opened:
        yield opened


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tgi", messages=HELLO, temperature=0, max_completion_tokens=40)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content == HELLO_BACK
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None and choice.logprobs is None
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.created > 1_700_000_000


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tgi", messages=HELLO, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == HELLO_BACK
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 5


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tgi", messages=HELLO, temperature=0) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert deltas == final.choices[0].message.content == HELLO_BACK
    assert final.choices[0].message.role == "assistant"


def test_several_choices_and_seed(client: openai.OpenAI) -> None:
    def asked() -> list[str | None]:
        answer = client.chat.completions.create(
            model="tgi", messages=HELLO, temperature=1.8, n=3, seed=5, max_tokens=12, user="x", store=False,
            presence_penalty=0.1, frequency_penalty=0.1, stop="zzz", logit_bias={"1": 0}, parallel_tool_calls=False,
            extra_body={"top_k": 40, "repetition_penalty": 1.0, "chat_template_kwargs": {}},
        )  # fmt: skip
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    assert asked() == asked()


def test_stop_and_length(client: openai.OpenAI) -> None:
    count: Any = [{"role": "user", "content": "Count to 10."}]
    answer = client.chat.completions.create(model="tgi", messages=count, temperature=0, stop=", 5")
    assert answer.choices[0].message.content == "1, 2, 3, 4" and answer.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(model="tgi", messages=count, temperature=0, max_tokens=3)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3


def test_developer_role_and_parts(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "Answer with one word."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of Spain?"}]},
    ]
    answer = client.chat.completions.create(model="tgi", messages=messages, temperature=0).choices[0].message.content
    assert answer is not None and "Madrid" in answer


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tgi", messages=HELLO, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 5 and "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        best = token.top_logprobs[0]
        assert token.logprob <= 0 and len(token.top_logprobs) == 3 and best.token == token.token
    chunks = client.chat.completions.create(
        model="tgi", messages=HELLO, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3, stream=True
    )
    streamed = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in tokens], abs=1e-4)


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="tgi", messages=ANNA, temperature=0, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Anna", age=30)
    sky: Any = [{"role": "user", "content": "What colour is the sky?"}]
    answer = client.chat.completions.parse(model="tgi", messages=sky, temperature=0, response_format=Colour)
    assert isinstance(answer.choices[0].message.parsed, Colour)


def test_parse_that_is_cut(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tgi", messages=ANNA, temperature=0, response_format=Person, max_tokens=3)


def test_streamed_parse(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tgi", messages=ANNA, temperature=0, response_format=Person) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Anna", age=30)


@pytest.mark.parametrize("response_format", [{"type": "json_object"}, {"type": "text"}])
def test_response_format(client: openai.OpenAI, response_format: Any) -> None:
    answer = client.chat.completions.create(model="tgi", messages=ANNA, temperature=0, response_format=response_format)
    assert json.loads(answer.choices[0].message.content) == {"name": "Anna", "age": 30}


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tgi", prompt="The capital of France is", temperature=0, max_tokens=8)
    assert answer.choices[0].text.startswith(" Paris") and answer.object == "text_completion"
    answer = client.completions.create(
        model="tgi", prompt=["The sky is", "2 plus 3 is"], temperature=0, max_tokens=6, n=1, best_of=1, top_p=1,
        frequency_penalty=0, presence_penalty=0, echo=True,
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("The sky is blue") and answer.choices[1].text.startswith("2 plus 3 is 5")


def test_completion_stream(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tgi", "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.choices[0].text.startswith(" 6, 7")


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tgi", prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=4, logprobs=2, echo=True
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens).endswith(answer.choices[0].text)
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.top_logprobs[0] is None and all(len(tokens) >= 2 for tokens in logprobs.top_logprobs[1:])
    assert all(token in top for token, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True))
    assert logprobs.text_offset[0] == 0 and sorted(logprobs.text_offset) == logprobs.text_offset


def test_models(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["demo"] and models[0].created > 1_700_000_000
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


async def test_async_client(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        answer = await client.chat.completions.create(model="tgi", messages=HELLO, temperature=0)
        assert answer.choices[0].message.content == HELLO_BACK
        stream = await client.chat.completions.create(model="tgi", messages=HELLO, temperature=0, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == HELLO_BACK
        assert [model.id async for model in client.models.list()] == ["demo"]
