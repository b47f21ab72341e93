"""OpenAI's routes as their users count on them, through a whole server with small limits."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest
from support.acceptance import SCHEMA, chat, generate
from support.answers import events_of, ok, refused

pytestmark = pytest.mark.e2e


def test_openai_streams(client: httpx.Client) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4, "ignore_eos": True}
    messages = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/invocations", {"messages": messages}),
    ):
        events, last = events_of(client, path, body | usage)
        assert last == "data: [DONE]"
        assert len(events) == 5 and len({(event["id"], event["created"]) for event in events}) == 1
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "length"]
        assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4
        assert all(event["usage"] is None for event in events[:-1])
        assert {event["system_fingerprint"] for event in events} == {"3.3.7-native"}


def test_completions(client: httpx.Client) -> None:
    prompts = ["The quick", "Hello", "What is"]
    asked = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    whole = ok(client.post("/v1/completions", json={"prompt": prompts} | asked))
    assert re.fullmatch("cmpl-[0-9a-f]{32}", whole["id"])
    alone = [ok(client.post("/v1/completions", json={"prompt": prompt} | asked)) for prompt in prompts]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in whole["choices"]] == [one["choices"][0]["text"] for one in alone]
    for name in ("prompt_tokens", "completion_tokens"):
        assert whole["usage"][name] == sum(one["usage"][name] for one in alone)
    five = client.post("/v1/completions", json={"prompt": ["x"] * 5})
    refused(five, 400, "batch size exceeded", "Given: 5")
    refused(client.post("/v1/completions", json={"prompt": "x", "suffix": "y"}), 400, "suffix not supported")


def test_a_prompt_of_the_tokens_of_a_text(client: httpx.Client) -> None:
    asked = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    ids = [span["id"] for span in ok(client.post("/tokenize", json={"inputs": "The quick brown"}))]
    by_ids = ok(client.post("/v1/completions", json={"prompt": ids} | asked))
    by_text = ok(client.post("/v1/completions", json={"prompt": "The quick brown"} | asked))
    assert (
        by_ids["choices"] == by_text["choices"] and by_ids["usage"]["total_tokens"] == by_text["usage"]["total_tokens"]
    )
    refused(client.post("/v1/completions", json={"prompt": [ids[0], 10**6]} | asked), 400, "validation", "1000000")


def test_a_prompt_of_tokens_that_no_text_has(client: httpx.Client) -> None:
    def ids_of(text: str) -> list[int]:
        return [span["id"] for span in ok(client.post("/tokenize", json={"inputs": text}))]

    whole = ids_of("The quick")
    ids = [whole[0], *(ids_of(letter)[-1] for letter in "The quick")]
    assert len(ids) > len(whole)
    asked = {"prompt": ids, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 0, "ignore_eos": True}
    answer = ok(client.post("/v1/completions", json=asked))
    (choice,) = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert choice["text"].startswith("<s>The quick")
    assert choice["logprobs"]["tokens"][: len(ids)] == ["<s>", *"The quick"], "just these, and not those of their text"
    assert choice["logprobs"]["text_offset"][: len(ids)] == [0, *range(3, 12)]
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_stops(client: httpx.Client) -> None:
    asked = {"prompt": "The quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = ok(client.post("/v1/completions", json=asked))["choices"][0]["text"]
    stop = text[6:8]
    before = text[: text.index(stop)]
    choice = ok(client.post("/v1/completions", json=asked | {"stop": stop}))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    events, _ = events_of(client, "/v1/completions", asked | {"stop": stop, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == before
    parameters = {"max_new_tokens": 12, "ignore_eos": True, "stop": [stop], "details": True}
    answer = ok(generate(client, "The quick", **parameters))
    assert answer["generated_text"] == before + stop and answer["details"]["finish_reason"] == "stop_sequence"
    # The same stop, completed by the last token that is allowed.
    number = answer["details"]["generated_tokens"]
    answer = ok(generate(client, "The quick", **parameters | {"max_new_tokens": number}))
    assert answer["generated_text"] == before + stop and answer["details"]["finish_reason"] == "length"
    choice = ok(client.post("/v1/completions", json=asked | {"stop": stop, "max_tokens": number}))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    events, _ = events_of(client, "/v1/completions", asked | {"stop": stop, "max_tokens": number, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == before


def test_chat(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    whole, flat = (ok(chat(client, {"role": "user", "content": c}, temperature=0)) for c in ("Hello", parts))
    assert whole["choices"] == flat["choices"] and whole["usage"]["total_tokens"] == flat["usage"]["total_tokens"]
    assert list(whole["choices"][0]) == ["index", "message", "logprobs", "finish_reason"]
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", whole["id"])

    def templated(*messages: dict[str, Any]) -> str:
        return str(ok(client.post("/chat_tokenize", json={"messages": list(messages)}))["templated_text"])

    user = {"role": "user", "content": "Hello"}
    developer, system = ({"role": role, "content": "Be brief"} for role in ("developer", "system"))
    assert templated(developer, user) == templated(system, user)
    continued = templated(user, {"role": "assistant", "content": "I am"})
    assert continued.endswith("I am") and templated(user).endswith("<|assistant|>")
    ok(chat(client, developer, user))
    refused(chat(client, {"role": "user", "content": [{"type": "audio"}]}), 400, "validation", "messages")


@pytest.mark.parametrize(
    "form",
    [{"type": "json", "value": SCHEMA}, {"type": "json_object", "value": SCHEMA},
     {"type": "json_object", "schema": SCHEMA},
     {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
     {"type": "json_schema", "value": {"schema": SCHEMA}}, {"type": "regex", "value": r'\{"ok": ?(true|false)\}'},
     {"type": "json", "value": json.dumps(SCHEMA)}],
)  # fmt: skip
def test_response_formats(client: httpx.Client, form: dict[str, Any]) -> None:
    choice = ok(chat(client, response_format=form, max_tokens=60, temperature=2.0, seed=4))["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_other_response_formats(client: httpx.Client) -> None:
    answer = ok(chat(client, response_format={"type": "json_object"}, max_tokens=400, seed=4))["choices"][0]
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"]), dict)
    ok(chat(client, response_format={"type": "text"}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    forced = {"response_format": {"type": "json_object"}, "tools": [tool], "tool_choice": "required"}
    assert ok(chat(client, max_tokens=60, **forced))["choices"][0]["message"]["tool_calls"]
