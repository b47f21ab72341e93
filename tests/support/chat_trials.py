"""Asks a scripted model by each of the chat APIs, at once and streamed, and compares what clients get."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from support.scripted_server import Served, at_once

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = (CHAT, RESPONSES, MESSAGES)


@dataclass
class Answer:
    """What a client of any of the APIs gets. `calls`: names and the JSON text of arguments; `finish`: chat's word,
    without the difference between an end and a call where the API makes none."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""
    stop: str | None = None  # that ended it, in the API that says it

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        """Of the calls that are complete JSON, parsed; others as text."""
        return [(name, _parsed(text)) for name, text in self.calls]


def ask(served: Served, message: str, *, apis: Sequence[str] = (CHAT,), **fields: Any) -> Answer:
    """The answer to a chat of one message, at temperature 0; `fields`: of the chat body. It must be the same by all of
    `apis`, whole and streamed."""
    bodies = [(api, _BODIES[api](message, dict(fields))) for api in apis]
    asked = [partial(_ask, served, api, body, is_stream) for api, body in bodies for is_stream in (False, True)]
    answers = at_once(*asked)
    first = answers[0]
    for (api, is_stream), answer in zip([(api, is_s) for api in apis for is_s in (False, True)], answers, strict=True):
        same = (answer.content, answer.reasoning, answer.arguments) == (first.content, first.reasoning, first.arguments)
        assert same and _is_end(answer.finish, first.finish), (api, is_stream, answer, first)
    return first


def ask_all(served: Served, messages: Sequence[str], **fields: Any) -> list[Answer]:
    """As `ask`, of several chats at once."""
    return at_once(*(partial(ask, served, message, **fields) for message in messages))


def _is_end(one: str, other: str) -> bool:
    return one == other or {one, other} == {"stop", "tool_calls"}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _ask(served: Served, api: str, body: dict[str, Any], is_stream: bool) -> Answer:
    answer = served.post(api, body | {"stream": is_stream})
    assert answer.status_code == 200, answer.text
    return (_STREAMED if is_stream else _WHOLE)[api](answer)


def _chat_body(message: str, fields: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": message}]
    return {"messages": messages, "temperature": 0, "max_tokens": 600} | fields


def _responses_body(message: str, fields: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "tgi", "input": message, "temperature": 0, "max_output_tokens": fields.pop("max_tokens", 600)}
    return body | _tools_of(fields, lambda function: {"type": "function"} | function)


def _messages_body(message: str, fields: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": message}]
    body = {"model": "tgi", "messages": messages, "temperature": 0, "max_tokens": fields.pop("max_tokens", 600)}
    if "stop" in fields:
        body["stop_sequences"] = fields.pop("stop")
    if fields.get("tool_choice") == "required":
        fields["tool_choice"] = {"type": "any"}
    return body | _tools_of(fields, lambda function: {"name": function["name"], "input_schema": function["parameters"]})


def _tools_of(fields: dict[str, Any], of_function: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    if "tools" not in fields:
        return fields
    return fields | {"tools": [of_function(tool["function"]) for tool in fields["tools"]]}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream of events."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _chat(answer: httpx.Response) -> Answer:
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    if calls or message.get("reasoning"):
        assert message["content"] != ""
    return Answer(message["content"] or "", message.get("reasoning", ""), calls, choice["finish_reason"])


def _chat_stream(answer: httpx.Response) -> Answer:
    found = Answer()
    for event in events_of(answer):
        assert not found.finish, "nothing follows the finish reason"
        (choice,) = event["choices"]
        delta = choice["delta"]
        found.content += delta.get("content") or ""
        found.reasoning += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                found.calls.append((function["name"], ""))
            assert call["index"] == len(found.calls) - 1
            name, arguments = found.calls[-1]
            found.calls[-1] = (name, arguments + function["arguments"])
        found.finish = choice["finish_reason"] or ""
    return found


def _responses(answer: httpx.Response) -> Answer:
    return _of_response(answer.json())


def _of_response(whole: dict[str, Any]) -> Answer:
    found = Answer(finish="length" if whole["status"] == "incomplete" else "stop")
    for item in whole["output"]:
        if item["type"] == "function_call":
            found.calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            found.reasoning += item["content"][0]["text"]
        else:
            found.content = _joined(found.content, item["content"][0]["text"])
    return found


def _joined(before: str, text: str) -> str:
    """Texts that stand apart, as the chat route joins them."""
    is_apart = not before or not text or before[-1:].isspace() or text[:1].isspace()
    return before + text if is_apart else f"{before}\n{text}"


def _responses_stream(answer: httpx.Response) -> Answer:
    events, found, text = events_of(answer), Answer(), ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_text.delta":
            text += event["delta"]
        elif kind == "reasoning_text.delta":
            found.reasoning += event["delta"]
        elif kind == "output_item.added" and event["item"]["type"] == "function_call":
            found.calls.append((event["item"]["name"], ""))
        elif kind == "function_call_arguments.delta":
            found.calls[-1] = (found.calls[-1][0], found.calls[-1][1] + event["delta"])
        elif kind == "output_item.done":
            found.content, text = _joined(found.content, text), ""
    whole = _of_response(events[-1]["response"])
    found.finish = whole.finish
    assert found == whole
    return found


def _messages(answer: httpx.Response) -> Answer:
    whole = answer.json()
    found = Answer(finish=_FINISH[whole["stop_reason"]], stop=whole["stop_sequence"])
    for block in whole["content"]:
        if block["type"] == "tool_use":
            found.calls.append((block["name"], json.dumps(block["input"])))
        elif block["type"] == "thinking":
            found.reasoning += block["thinking"]
        else:
            found.content = _joined(found.content, block["text"])
    return found


def _messages_stream(answer: httpx.Response) -> Answer:
    found, text = Answer(), ""
    for event in events_of(answer):
        if event["type"] == "content_block_start":
            block, text = event["content_block"], ""
            if block["type"] == "tool_use":
                found.calls.append((block["name"], ""))
        elif event["type"] == "content_block_stop":
            found.content = _joined(found.content, text)
        elif event["type"] == "message_delta":
            found.finish, found.stop = _FINISH[event["delta"]["stop_reason"]], event["delta"]["stop_sequence"]
        delta = event.get("delta", {})
        text += delta.get("text", "")
        found.reasoning += delta.get("thinking", "")
        if "partial_json" in delta:
            found.calls[-1] = (found.calls[-1][0], found.calls[-1][1] + delta["partial_json"])
    return found


_FINISH = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length", "stop_sequence": "stop"}
_BODIES = {CHAT: _chat_body, RESPONSES: _responses_body, MESSAGES: _messages_body}
_WHOLE = {CHAT: _chat, RESPONSES: _responses, MESSAGES: _messages}
_STREAMED = {CHAT: _chat_stream, RESPONSES: _responses_stream, MESSAGES: _messages_stream}
