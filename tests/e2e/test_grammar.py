"""Grammars through the whole server: answers parse and validate whatever the sampling parameters are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from support.running_server import RunningServer

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


@pytest.fixture
def client(llama_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=llama_server.url, timeout=60) as opened:
        yield opened


def _generate(client: httpx.Client, inputs: str = "Hello", **parameters: Any) -> Any:
    answer = client.post("/generate", json={"inputs": inputs, "parameters": {"max_new_tokens": 200} | parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()["generated_text"]


@pytest.mark.parametrize(
    "draw",
    [{}, {"do_sample": True, "temperature": 2.0, "seed": 3}, {"top_k": 2, "seed": 1}, {"top_p": 0.2, "seed": 2},
     {"typical_p": 0.3, "seed": 5}, {"repetition_penalty": 2.0}, {"watermark": True, "min_p": 0.3, "seed": 6},
     {"frequency_penalty": -2.0, "ignore_eos": True}],
)  # fmt: skip
def test_native(client: httpx.Client, draw: dict[str, Any]) -> None:
    value = json.loads(_generate(client, grammar={"type": "json", "value": SCHEMA}, **draw))
    jsonschema.validate(value, SCHEMA)
    assert list(value) == ["name", "age", "tags"]
    pattern = r"[0-9]{3}-[A-F]{2}( [a-z]{1,4})?"
    assert re.fullmatch(pattern, _generate(client, grammar={"type": "regex", "value": pattern}, **draw))


def test_a_stream_is_the_same_text(client: httpx.Client) -> None:
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 200, "grammar": {"type": "json", "value": SCHEMA}}}
    with client.stream("POST", "/generate_stream", json=body) as answer:
        events = [json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:")]
    text = events[-1]["generated_text"]
    assert text == _generate(client, "Hi", grammar={"type": "json", "value": SCHEMA})
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == text
    jsonschema.validate(json.loads(text), SCHEMA)


def test_openai_response_format(llama_server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "Hello!"}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    with openai.OpenAI(base_url=f"{llama_server.url}/v1", api_key="-", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tgi", messages=messages, max_tokens=200, response_format=form, n=2, seed=7
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(
                model="tgi", messages=messages, response_format={"type": "json_schema", "json_schema": {"name": "x"}}
            )


def test_neighbours_of_grammars_and_of_bombs_are_undisturbed(client: httpx.Client) -> None:
    prompts = [f"Tell me {i}" for i in range(4)]
    alone = [_generate(client, prompt, max_new_tokens=60) for prompt in prompts]

    def asked(job: tuple[str, Any]) -> Any:
        prompt, grammar = job
        body = {"inputs": prompt, "parameters": {"max_new_tokens": 60} | ({"grammar": grammar} if grammar else {})}
        return client.post("/generate", json=body)

    bombs = [{"type": "regex", "value": f"x{i}{'{4294967295}'}"} for i in range(4)]
    good = [{"type": "regex", "value": "[a-z]{20,30}"}] * 4
    jobs = [
        (prompt, form) for row in zip(good, bombs, [None] * 4, strict=True) for form in row for prompt in prompts[:1]
    ]
    jobs += [(prompt, None) for prompt in prompts]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(asked, jobs))
    for (_, form), answer in zip(jobs, answers, strict=True):
        if form in bombs:
            assert answer.status_code == 422 and answer.json()["error_type"] == "validation"
        elif form is not None:
            assert re.fullmatch(form["value"], answer.json()["generated_text"])
    assert [answer.json()["generated_text"] for answer in answers[-4:]] == alone
