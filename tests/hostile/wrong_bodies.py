"""Bodies that no client should send: what is wrong, the path, the body, the statuses that may answer it.

The first word of each is its row in the list of attacks.
"""

from __future__ import annotations

from typing import Any

GENERATE = "/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | fields


def native(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "Hi", "parameters": {"max_new_tokens": 4} | parameters}


def said(content: Any, **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} | message], "max_tokens": 4}


def schema(value: Any) -> dict[str, Any]:
    return native(grammar={"type": "json", "value": value})


def regex(expression: str) -> dict[str, Any]:
    return native(grammar={"type": "regex", "value": expression})


def nested(depth: int) -> Any:
    made: Any = {"type": "string"}
    for _ in range(depth):
        made = {"oneOf": [made, {"type": "null"}]}
    return made


_DEEP = b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
_TOOL = {"type": "function", "function": {"name": "f"}}
HOSTILE: list[tuple[str, str, Any, set[int]]] = [
    ("E4 nested arrays", GENERATE, _DEEP, {400}),
    ("E4 nested objects", CHAT, b'{"messages":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, {400}),
    ("E5 NaN", GENERATE, b'{"inputs":"a","parameters":{"temperature":NaN}}', {422}),
    ("E5 1e999", CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}', {400}),
    ("E5 5000 digits", COMPLETIONS, b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", {400}),
    ("E6 half a pair", GENERATE, b'{"inputs":"\\ud800"}', {400}),
    ("E6 half a pair in a chat", CHAT, b'{"messages":[{"role":"user","content":"\\udfff"}]}', {400}),
    ("E6 no UTF-8", GENERATE, b'{"inputs":"\xff\xfe"}', {400}),
    ("E6 NUL", GENERATE, native() | {"inputs": "\0\0"}, {200}),
    ("E6 NUL in a chat", CHAT, said("\0"), {200}),
    ("E6 a mark of byte order", GENERATE, b'\xef\xbb\xbf{"inputs":"a","parameters":{"max_new_tokens":1}}', {200, 400}),
    ("E6 1 MB without a space", GENERATE, native() | {"inputs": "x" * 1_000_000}, {422}),
    ("E6 only marks", GENERATE, native(truncate=50) | {"inputs": "\u0301" * 3000}, {200}),
    ("E8 a stop text of 1 MB", GENERATE, native(stop=["x" * 1_000_000]), {422}),
    ("E8 an empty stop text", CHAT, chat(stop=["", ""]), {200}),
    ("E8 100 000 stop texts", COMPLETIONS, {"prompt": "a", "stop": ["x"] * 100_000}, {400}),
    ("E9 n", CHAT, chat(n=2**32 - 1), {400}),
    ("E9 best_of", GENERATE, native(best_of=2**63, do_sample=True), {422}),
    ("E9 best_of of completions", COMPLETIONS, {"prompt": "a", "best_of": 2**32 - 1}, {400}),
    ("E9 top_n_tokens", GENERATE, native(top_n_tokens=2**32 - 1), {422}),
    ("E9 logprobs", COMPLETIONS, {"prompt": "a", "logprobs": 2**32 - 1}, {400}),
    ("E9 100 000 biases", CHAT, chat(logit_bias={str(i): 1 for i in range(100_000)}), {400}),
    ("E9 a bias of nothing", CHAT, chat(logit_bias={"4294967295": 1, "99999999999999999999": 1}), {400}),
    ("E9 everything banned", CHAT, chat(logit_bias={str(i): -100 for i in range(1024)}), {200, 500}),
    ("E9 100 000 prompts", COMPLETIONS, {"prompt": ["a"] * 100_000}, {400}),
    ("E9 300 000 token ids", COMPLETIONS, {"prompt": [1] * 300_000}, {400}),
    ("E9 an unknown token id", COMPLETIONS, {"prompt": [4_000_000_000]}, {400}),
    ("E10 a prompt of the payload's size", GENERATE, native() | {"inputs": "word " * 390_000}, {422}),
    ("E11 nested repeats", GENERATE, regex("((a{1,999}){1,999}){1,999}"), {200, 422}),
    ("E11 alternatives", GENERATE, regex("(a|a?)+" * 400), {200, 422}),
    ("E11 look-around", GENERATE, regex("(?<=a)b"), {422}),
    ("E11 broken", GENERATE, regex("["), {422}),
    ("E11 nothing matches", GENERATE, regex("[^\\s\\S]"), {422, 424}),
    ("E12 deep oneOf", GENERATE, schema(nested(60)), {200, 422}),
    ("E12 recursive", GENERATE, schema({"$ref": "#"}), {422}),
    ("E12 recursive through properties", GENERATE, schema({"properties": {"a": {"$ref": "#"}}}), {200, 422}),
    ("E12 10 000 properties", GENERATE, schema({"properties": {f"p{i}": {} for i in range(10_000)}}), {200, 422}),
    ("E12 no type", GENERATE, schema({"type": "nothing", "properties": {}}), {422}),
    ("E12 a pattern", GENERATE, schema({"properties": {"a": {"type": "string", "pattern": "(a{1,999}){1,999}"}}}),
     {200, 422}),
    ("E14 a template in a message", CHAT, said("{{ ''.__class__.__mro__ }}{% for i in x %}"), {200}),
    ("E14 a template in a role", CHAT, said("Hi", role="{{ 7*7 }}"), {200, 400}),
    ("E14 a template of one's own", CHAT, chat(chat_template="{{ 'a' * 10**9 }}"), {200, 400}),
    ("E14 variables", CHAT, chat(chat_template_kwargs={"messages": [], "raise_exception": 1}), {200, 400}),
    ("E15 10 000 messages", CHAT, {"messages": [{"role": "user", "content": ""}] * 10_000}, {400}),
    ("E15 10 001 messages", CHAT, {"messages": [{"role": "user", "content": ""}] * 10_001}, {400}),
    ("E15 a role of another kind", CHAT, said("Hi", role=7), {400}),
    ("E15 parts of another kind", CHAT, said([{"type": "text"}, {"type": "audio", "audio": 1}]), {400}),
    ("E15 a tool without a name", CHAT, chat(tools=[{"type": "function", "function": {}}]), {400}),
    ("E15 tools that are no list", CHAT, chat(tools={"a": 1}), {400}),
    ("E15 5000 tools", CHAT, chat(tools=[_TOOL] * 5000), {400}),
    ("E15 a tool with a broken schema", CHAT, chat(tools=[{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "nothing"}}}}}],
        tool_choice="required"), {400}),
    ("E15 a choice of nothing", CHAT, chat(tools=[_TOOL], tool_choice={"function": None}), {400}),
    ("E15 a call without a function", CHAT, said(None, role="assistant", tool_calls=[{"id": "1"}]), {400}),
    ("E17 an adapter by path", GENERATE, native(adapter_id="../../../etc/passwd"), {422}),
    ("E17 an adapter by address", GENERATE, native(adapter_id="http://127.0.0.1/x"), {422}),
    ("E17 a model by path", CHAT, chat(model="../../../etc/passwd"), {200}),
]  # fmt: skip
