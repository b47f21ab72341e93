"""Tool calls in a model's own format through the whole server: a random model, held to the format and its schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from support.running_server import RunningServer, running_server
from support.tiny_models import VOCAB_SIZE, tiny_checkpoint, write_tokenizer
from tokenizers import Tokenizer

# In `make test` the scripted model shows every format (tests/e2e/scripted).
pytestmark = [pytest.mark.e2e, pytest.mark.long]

MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '' if loop.first else '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "\n{% endfor %}{% if add_generation_prompt %}<|user|>assistant: "
    "{{ '<think>\n\n</think>' if enable_thinking is false }}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "array", "items": {"enum": ["Mon", "日"]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
NUM_SEEDS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("native"), with_tokenizer=False)
    write_tokenizer(path, vocab_size=VOCAB_SIZE - len(MARKS))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with running_server(path, "--dtype", "float32") as running:
        yield running


def ask(server: RunningServer, path: str, **fields: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json={"model": "tgi"} | fields, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_format_is_found(server: RunningServer) -> None:
    info = httpx.get(f"{server.url}/info").json()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", "think")


def test_demanded_calls_fit_their_schemas(server: RunningServer) -> None:
    """Also behind thinking, which a random model does not end by itself."""

    def one(seed: int) -> Any:
        return ask(
            server, "/v1/chat/completions", messages=[{"role": "user", "content": f"Hi {seed}"}], tools=[TOOL],
            tool_choice="required", seed=seed, max_tokens=400, parallel_tool_calls=False,
            chat_template_kwargs={"enable_thinking": False},
        )  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        for answer in pool.map(one, range(NUM_SEEDS)):
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            (call,) = choice["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_noise_never_shows_a_mark(server: RunningServer) -> None:
    def one(seed: int) -> Any:
        return ask(
            server, "/v1/chat/completions", messages=[{"role": "user", "content": f"Hi {seed}"}], tools=[TOOL],
            seed=seed, max_tokens=150, temperature=3.0,
        )  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        for answer in pool.map(one, range(NUM_SEEDS)):
            choice = answer["choices"][0]
            assert not any(mark in (choice["message"]["content"] or "") for mark in MARKS[:2])
            for call in choice["message"].get("tool_calls", ())[: -1 if choice["finish_reason"] == "length" else None]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_the_other_chat_apis(server: RunningServer) -> None:
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    message = ask(
        server, "/v1/messages", messages=[{"role": "user", "content": "Hi"}], max_tokens=400, tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, thinking={"type": "disabled"},
    )  # fmt: skip
    (block,) = message["content"]
    again = ask(server, "/v1/messages", messages=[{"role": "user", "content": "Hi" * 100}], max_tokens=1)["usage"]
    repeated = ask(server, "/v1/messages", messages=[{"role": "user", "content": "Hi" * 100}], max_tokens=1)["usage"]
    assert repeated["cache_read_input_tokens"] > 0
    assert sum(map(repeated.get, ("input_tokens", "cache_read_input_tokens"))) == again["input_tokens"]
    assert message["stop_reason"] == "tool_use" and block["name"] == "get_weather"
    jsonschema.validate(block["input"], SCHEMA)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        response = client.responses.create(model="tgi", input="Hi", max_output_tokens=8, temperature=0)
        assert response.status == "incomplete" and response.usage and response.usage.output_tokens == 8
