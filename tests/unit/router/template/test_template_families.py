"""Chat templates in the manner of the model families, rendered as transformers renders them.

The whole way from a client's JSON to the prompt, against `render_jinja_template` with the messages that a user of
transformers would pass.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError as JinjaError
from transformers.utils.chat_template_utils import render_jinja_template

from router.api.chat.prompt import turns_of, variables_of
from router.api.chat.schema import ChatBody
from router.api.chat.tools import OfferedTools, offered_tools
from router.template.compiled import CompiledTemplate
from router.template.fallbacks import other_forms
from router.template.sandbox import ChatEnvironment

TEMPLATES = {path.stem: path.read_text() for path in sorted(Path(__file__).with_name("templates").glob("*.jinja"))}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city <é> & \"more\"",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                    "days": {"type": ["integer", "string"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object",
     "properties": {}}}},
]  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief.\n"}
USER = {"role": "user", "content": " What is <b>this</b> & 'that'? "}
SAID = {"role": "assistant", "content": 'It is "it".\n\n'}
AGAIN = {"role": "user", "content": "日本語 🙂 ümläut {{ 7 * 7 }} {% raw %}"}


def call(
    identifier: str = "abcdefgh1", arguments: Any = '{"city": "Zürich", "n": [1, 2.5, null]}', **fields: Any
) -> Any:
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": identifier, "type": "function", "function": function}]} | fields


def result(identifier: str = "abcdefgh1", content: str = '{"t": 3}') -> Any:
    return {"role": "tool", "tool_call_id": identifier, "content": content}


_TWO = call()
_TWO["tool_calls"] = [*_TWO["tool_calls"], *call("abcdefgh2", {"city": "Rom"})["tool_calls"]]
TEXTS = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, SAID, AGAIN],
    "many": [SYSTEM, USER, SAID, AGAIN, SAID, USER],
    "call": [USER, call(), result()],
    "call and words": [SYSTEM, USER, call(content="Let me see."), result(), SAID, AGAIN],
    "two calls": [USER, _TWO, result(), result("abcdefgh2", "warm")],
    "call without content": [USER, call(content=None, arguments="{}"), result(), AGAIN],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "parts": [{"role": "user", "content": TEXTS}, SAID, USER],
    "system parts": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, USER],
    "name": [USER | {"name": "Ann"}],
    "reasoning": [USER, SAID | {"reasoning_content": "Hm."}, AGAIN, call(reasoning_content="So."), result()],
    "thought": [USER, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nbecause"}, AGAIN],
    "empty": [{"role": "user", "content": ""}],
    "continue": [USER, {"role": "assistant", "content": "Once upon a"}],
    "continue after turns": [SYSTEM, USER, SAID, AGAIN, {"role": "assistant", "content": "s"}],
}  # fmt: skip


def plain(message: dict[str, Any], source: str) -> dict[str, Any]:
    """What a user of transformers would write for such a template."""
    plain = {key: value for key, value in message.items() if value is not None}
    if plain["role"] == "developer" and "developer" not in source:
        plain["role"] = "system"
    iterates = "['content'][0]" in source or "in message['content'] " in source
    if isinstance(plain.get("content"), list) and not iterates:
        plain["content"] = "".join(part["text"] for part in plain["content"])
    if calls := plain.get("tool_calls"):
        calls = [one | {"function": dict(one["function"])} for one in calls]
        for one in calls:
            arguments = one["function"]["arguments"]
            one["function"]["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
        plain["tool_calls"] = calls
        if "tool_calls" not in source:
            text = json.dumps(plain.pop("tool_calls"), ensure_ascii=False, separators=(",", ":"))
            plain["content"] = "\n".join(filter(None, [plain.get("content", ""), text]))
    return plain


def by_transformers(source: str, chat: list[dict[str, Any]], tools: Any, continues: bool, **variables: Any) -> str:
    (text,), _ = render_jinja_template(
        conversations=[[plain(message, source) for message in chat]],
        tools=tools,
        chat_template=source,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        **TOKENS,
        **variables,
    )
    return str(text).rstrip() if continues else str(text)


@cache
def compiled(source: str) -> CompiledTemplate:
    return CompiledTemplate(ChatEnvironment(), source)


def ours(source: str, chat: list[dict[str, Any]], tools: Any, **variables: Any) -> str:
    body = ChatBody.model_validate({"messages": chat, "tools": tools, "chat_template_kwargs": variables})
    offered: OfferedTools | None = offered_tools(body)
    listed = None if offered is None else offered.for_template()
    return compiled(source).render(turns_of(body, None, "messages"), listed, None, TOKENS | variables_of(body))


def has_other_forms(chat: list[dict[str, Any]]) -> bool:
    return any(other_forms(turns_of(ChatBody.model_validate({"messages": chat}), None, "messages")))


def test_there_are_many() -> None:
    assert len(TEMPLATES) >= 30


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_same_text_as_transformers(name: str) -> None:
    source = TEMPLATES[name]
    reads_tools = " tools" in source
    rendered = 0
    for title, chat in CHATS.items():
        continues = title.startswith("continue")
        for tools in (None, TOOLS, TOOLS[:1]) if reads_tools else (None,):
            for variables in ({}, {"enable_thinking": False, "reasoning_effort": "high", "date_string": "today"}):
                case = (title, bool(tools), bool(variables))
                try:
                    expected = by_transformers(source, chat, tools, continues, **variables)
                except (JinjaError, TypeError) as error:
                    try:
                        assert ours(source, chat, tools, **variables) and has_other_forms(chat), case
                    except (JinjaError, TypeError) as refused:
                        assert (type(refused), str(refused)) == (type(error), str(error)), case
                else:
                    assert ours(source, chat, tools, **variables) == expected, case
                    rendered += 1
    assert rendered >= 10


@pytest.mark.parametrize("name", ["mistral_v3_tools", "mistral_nemo_tools"])
def test_ids_of_calls_fit_templates_that_count_their_letters(name: str) -> None:
    chat = [USER, call("call_0123456789abcdef"), result("call_0123456789abcdef")]
    text = ours(TEMPLATES[name], chat, None)
    assert '"id": "789abcdef"' in text and '"call_id": "789abcdef"' in text
    assert '"id": "000000001"' in ours(TEMPLATES[name], [USER, call("1"), result("1")], None)


def test_the_form_of_tools_is_openais_whatever_the_client_sends() -> None:
    sent = [
        {
            "function": {
                "strict": True,
                "arguments": {"properties": {"b": {}, "a": {}}},
                "description": "d",
                "name": "f",
            }
        },
        {"type": "function", "function": {"name": "g"}},
    ]
    text = ours("{{ tools | tojson }}", [USER], sent)
    assert text == (
        '[{"type": "function", "function": {"name": "f", "description": "d", '
        '"parameters": {"properties": {"b": {}, "a": {}}}}}, '
        '{"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}]'
    )
