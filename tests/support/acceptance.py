"""What the acceptance tests ask, and the small limits of the server that they ask."""

from __future__ import annotations

from typing import Any

import httpx
from support.answers import ok

KEY = "open sesame"
MAX_INPUT, MAX_TOTAL = 1900, 2000
MAX_CONCURRENT = 4
RARE = "\x01"  # one token each: no text of the tokenizer's training has it
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def generate(client: httpx.Client, inputs: str = "Hello", **parameters: Any) -> httpx.Response:
    return client.post("/generate", json={"inputs": inputs, "parameters": parameters})


def chat(client: httpx.Client, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    asked = list(messages) or [{"role": "user", "content": "Hello"}]
    return client.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 5} | fields)


def text_of(client: httpx.Client, num_tokens: int) -> str:
    """A prompt of exactly this many tokens."""
    added = len(ok(client.post("/tokenize", json={"inputs": RARE}))) - 1
    text = RARE * (num_tokens - added)
    assert len(ok(client.post("/tokenize", json={"inputs": text}))) == num_tokens
    return text
