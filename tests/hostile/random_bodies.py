"""Random request bodies, some sound and most wrong, for every route that takes one."""

from __future__ import annotations

import random
import string
from typing import Any

import orjson

from router.api.chat.schema import ChatBody, Message
from router.api.completions.schema import CompletionBody
from router.api.messages.schema import MessagesBody
from router.api.responses.schema import ResponsesBody
from router.api.tgi.schema import CompatBody, GenerateParameters
from router.api.tgi.tokenize_schema import TokenizeChatBody, TokenizeContentBody, TokenizePromptBody

MARK = "mark3r"
"""In what is said to the model: a log that holds it holds a prompt."""
_TEXTS = [
    "",
    MARK,
    "a",
    "system",
    "tool",
    "text",
    "json",
    "é🙂",
    "\x00",
    "</s>",
    "x" * 300,
    "1e5",
    "http://x/y.png",
    "{{ 7*7 }}",
]
_NUMBERS = [0, 1, -1, 2, 3.5, 0.0, -0.0, 1e-30, 1e30, 2**31, 2**32, 2**63, 2**64 - 1, 128, 2000]
_NAMES = [
    *GenerateParameters.model_fields, *ChatBody.model_fields, *CompatBody.model_fields, *Message.model_fields,
    *CompletionBody.model_fields,
    *MessagesBody.model_fields, *ResponsesBody.model_fields,
    "type", "text", "function", "url", "image_url", "arguments", "include_usage", "value", "schema", "unknown",
]  # fmt: skip

_PARTS = [
    "text", "image", "tool_use", "tool_result", "thinking", "document", "message", "function_call",
    "function_call_output", "custom_tool_call", "reasoning", "item_reference", "input_text", "input_image",
]  # fmt: skip
_PART_FIELDS = [
    "text", "source", "id", "name", "input", "tool_use_id", "content", "is_error", "thinking", "role", "call_id",
    "arguments", "output", "encrypted_content",
]  # fmt: skip


def value(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return None
    if kind == 1:
        return source.random() < 0.5
    if kind in (2, 3):
        return source.choice(_NUMBERS)
    if kind in (4, 5):
        return source.choice(_TEXTS) or "".join(source.choices(string.printable, k=5))
    if kind == 6:
        return [value(source, depth + 1) for _ in range(source.randrange(4))]
    return {source.choice(_NAMES): value(source, depth + 1) for _ in range(source.randrange(5))}


def some(source: random.Random, model: type[Any]) -> dict[str, Any]:
    """Some of a body's fields with values that are mostly wrong."""
    names = [name for name in model.model_fields if source.random() < 0.06]
    return {name: value(source) for name in names}


def native_body(source: random.Random) -> Any:
    return {"inputs": f"Hello {MARK}", "parameters": some(source, GenerateParameters), "stream": source.random() < 0.5}


def chat_body(source: random.Random) -> Any:
    messages = [{"role": "user", "content": f"Hello {MARK}"}, {"role": "user"} | some(source, Message)]
    return some(source, ChatBody) | {"messages": messages[: source.randint(1, 2)], "stream": source.random() < 0.5}


def completion_body(source: random.Random) -> Any:
    prompt = source.choice([f"Hello {MARK}", [MARK, "x"], [1, 2], value(source)])
    return some(source, CompletionBody) | {"prompt": prompt, "stream": source.random() < 0.5}


def tokenize_body(source: random.Random) -> Any:
    model = source.choice([TokenizePromptBody, TokenizeChatBody, TokenizeContentBody])
    name = next(name for name in ("prompt", "messages", "content") if name in model.model_fields)
    texts = [MARK, [{"role": "user", "content": MARK}], value(source)]
    return some(source, model) | {name: source.choice(texts)}


def detokenize_body(source: random.Random) -> Any:
    return {"tokens": source.choice([[1, 2], [2**31], [], value(source)])}


def vertex_body(source: random.Random) -> Any:
    kinds = (native_body, chat_body, value)
    return {"instances": [source.choice(kinds)(source) for _ in range(source.randrange(4))]}


def infer_body(source: random.Random) -> Any:
    name = source.choice(["x", "", 1])
    one = {"name": name, "shape": [1], "datatype": "BYTES", "data": source.choice([[72, 105], [255], value(source)])}
    number = source.randrange(3)
    return {"id": "1", "inputs": [one] * number, "outputs": [{"name": name}] * number} | some(source, ChatBody)


def part(source: random.Random) -> Any:
    """A block of the Messages API, or an item or part of the Responses API; mostly with something wrong."""
    fields = source.sample(_PART_FIELDS, k=source.randrange(1, 5))
    return {"type": source.choice(_PARTS)} | {
        name: source.choice([MARK, {}, [], "{}", value(source)]) for name in fields
    }


def messages_body(source: random.Random) -> Any:
    content = source.choice([f"Hello {MARK}", [part(source)], [part(source), part(source)], value(source)])
    messages = [{"role": "user", "content": f"Hello {MARK}"}, {"role": "assistant", "content": content}]
    fixed = {"model": "tgi", "max_tokens": 5, "messages": messages[: source.randint(1, 2)]}
    tools = {"tools": [{"name": "f", "input_schema": value(source)}]} if source.random() < 0.2 else {}
    return some(source, MessagesBody) | fixed | tools | {"stream": source.random() < 0.5}


def responses_body(source: random.Random) -> Any:
    asked = source.choice([f"Hello {MARK}", [part(source)], [{"role": "user", "content": MARK}, part(source)]])
    tools = {"tools": [{"type": "function", "name": "f", "parameters": value(source)}]} if source.random() < 0.2 else {}
    fixed = {"input": asked, "max_output_tokens": 5, "stream": source.random() < 0.5}
    return some(source, ResponsesBody) | tools | fixed


def damaged(source: random.Random, raw: bytes) -> bytes:
    """With one byte changed, removed or doubled."""
    position = source.randrange(len(raw))
    middle = source.choice([b"", bytes([source.randrange(256)]), raw[position : position + 1] * 2])
    return raw[:position] + middle + raw[position + 1 :]


ROUTES = [
    ("/", native_body),
    ("/generate", native_body),
    ("/generate_stream", native_body),
    ("/tokenize", native_body),
    ("/tokenize", tokenize_body),
    ("/detokenize", detokenize_body),
    ("/apply-template", chat_body),
    ("/v1/chat/completions", chat_body),
    ("/v1/chat/completions", chat_body),
    ("/v1/completions", completion_body),
    ("/invocations", native_body),
    ("/invocations", completion_body),
    ("/chat_tokenize", chat_body),
    ("/vertex", vertex_body),
    ("/v1/messages", messages_body),
    ("/v1/messages/count_tokens", messages_body),
    ("/v1/responses", responses_body),
    ("/v2/models/m/versions/1/infer", infer_body),
]


def random_request(source: random.Random) -> tuple[str, bytes]:
    """A route and what is sent to it."""
    path, body = source.choice(ROUTES)
    raw = orjson.dumps(value(source) if source.random() < 0.1 else body(source))
    return path, damaged(source, raw) if source.random() < 0.2 else raw
