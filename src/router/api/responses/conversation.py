"""From Responses bodies to chats."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import orjson

from router.api.chat.prompt import carried, chat_body, check_one_form
from router.api.chat.schema import ChatBody
from router.api.responses.input_items import (
    LOGPROBS,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    HostedItem,
    InputImage,
    InputPart,
    Item,
    MessageItem,
    ReasoningItem,
    SearchCallItem,
    SearchOutputItem,
)
from router.api.responses.schema import ResponsesBody
from router.api.responses.tools import SEARCH, ServedTools, custom_arguments

_PREFIX = "tercet1:"
"""How reasoning begins that this server has written; the rest is its text in base64. There is no secret in it."""


def chat_of(body: ResponsesBody, tools: ServedTools, items: list[Item]) -> ChatBody:
    """Return the chat of the whole conversation's `items`."""
    fields: dict[str, Any] = {
        **carried(body),
        "model": body.model,
        "messages": _turns(body, tools, items),
        **tools.choice(body.tool_choice),
    }
    if tools.functions:
        fields |= {"tools": tools.functions, "parallel_tool_calls": body.parallel_tool_calls}
    if (form := body.text.format).type != "text":
        check_one_form(fields, "text.format")
        schema = {} if form.schema_ is None else {"json_schema": {"schema": form.schema_}}
        fields["response_format"] = {"type": form.type, **schema}
    fields |= {"reasoning_effort": body.reasoning.effort, "max_tokens": body.max_output_tokens}
    fields |= {
        "service_tier": body.service_tier,
        "stop": body.stop,
        "chat_template_kwargs": body.chat_template_kwargs,
        "stream": body.stream,
    }
    fields |= {"thinking_token_budget": body.thinking_token_budget}
    if LOGPROBS in body.include:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return chat_body(fields)


def encrypted(text: str) -> str:
    """Encode reasoning that clients send back unread."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def with_encrypted(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item that is stored with its reasoning in both forms."""
    if item["type"] != "reasoning" or "encrypted_content" in item:
        return item
    return item | {"encrypted_content": encrypted("".join(part["text"] for part in item.get("content", ())))}


def _turns(body: ResponsesBody, tools: ServedTools, items: list[Item]) -> list[dict[str, Any]]:
    turns = _of_items(_with_its_reasoning(items, body.reasoning.context), tools)
    if body.instructions:
        turns.insert(0, {"role": "system", "content": body.instructions})
    return _one_system_turn(turns)


def _with_its_reasoning(items: list[Item], context: str | None) -> list[Item]:
    """Leave out the reasoning before the last message of the user, if `context` says so."""
    if context != "current_turn":
        return items
    places = [place for place, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"]
    last = places[-1] if places else 0
    return [item for place, item in enumerate(items) if place >= last or not isinstance(item, ReasoningItem)]


def _one_system_turn(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the first system turns, of which templates take one."""
    first = next((index for index, turn in enumerate(turns) if turn["role"] not in ("system", "developer")), len(turns))
    if first < 2:
        return turns
    text = "\n\n".join(_text(turn["content"]) for turn in turns[:first])
    return [{"role": "system", "content": text}, *turns[first:]]


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _of_items(items: list[Item], tools: ServedTools) -> list[dict[str, Any]]:
    """Join the assistant's adjacent reasoning, text and calls."""
    turns: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []  # by tools of other servers, before the next text
    for item in items:
        is_open = bool(found) and turns[-1].get("content") is found and "tool_calls" not in turns[-1]
        if isinstance(item, HostedItem):
            if not item.said:
                continue
            if not is_open:
                found = _assistant(turns, without=("content", "tool_calls"))["content"] = []
            found.append({"type": "text", "text": _found(item)})
        elif isinstance(item, MessageItem):
            content = _content(item.content)
            if item.role != "assistant":
                turns.append({"role": item.role, "content": content})
            elif is_open:
                found += content if isinstance(content, list) else [{"type": "text", "text": content}]
                found = []
            else:
                _assistant(turns, without=("content", "tool_calls"))["content"] = content
        elif isinstance(item, CallItem | CustomCallItem) or (isinstance(item, SearchCallItem) and item.call_id):
            _assistant(turns).setdefault("tool_calls", []).append(_call(item, tools))
        elif isinstance(item, ReasoningItem):
            if text := reasoning_text(item):
                _assistant(turns, without=("content", "tool_calls", "reasoning"))["reasoning"] = text
        elif isinstance(item, CallOutputItem):
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        elif isinstance(item, SearchOutputItem) and item.call_id:
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": tools.found(item)})
    return turns


def _found(item: HostedItem) -> str:
    return f"{item.type.removesuffix('_call')}: {orjson.dumps(item.said).decode()}\n"


def _assistant(turns: list[dict[str, Any]], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the open assistant's turn without these fields, or a new one."""
    if not turns or turns[-1]["role"] != "assistant" or any(name in turns[-1] for name in without):
        turns.append({"role": "assistant"})
    return turns[-1]


def _call(item: CallItem | CustomCallItem | SearchCallItem, tools: ServedTools) -> dict[str, Any]:
    if isinstance(item, SearchCallItem):
        name, arguments = SEARCH, orjson.dumps(item.arguments).decode()
    else:
        arguments = custom_arguments(item.input) if isinstance(item, CustomCallItem) else item.arguments
        name = tools.name_of(item.name, item.namespace)
    return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(parts: str | list[InputPart]) -> str | list[dict[str, Any]]:
    return parts if isinstance(parts, str) else [_part(part) for part in parts]


def _part(part: InputPart) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
    return {"type": "text", "text": part.refusal if part.type == "refusal" else part.text}


def reasoning_text(item: ReasoningItem) -> str:
    """Return its text, unless another server's form."""
    if item.content:
        return "".join(part.text for part in item.content)
    written = item.encrypted_content or ""
    if not written.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(written.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
