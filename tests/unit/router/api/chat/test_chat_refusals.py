"""Chats that are refused for their tools or messages, and what clients may give the template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, is_invalid, message_of
from tool_chats import PATH, body, tool

MakeRouter = Callable[..., Router]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tools": [], "tool_choice": "required"}, "`tools` is empty"),
        ({"tools": None, "tool_choice": "f"}, "`tools` is empty"),
        ({"tool_choice": "unknown"}, "`unknown`"),
        ({"tool_choice": "any"}, "`any`"),
        ({"tool_choice": ""}, "``"),
        ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "`unknown`"),
        ({"tool_choice": {"type": "function", "function": {"name": 3}}}, "name a function"),
        ({"tool_choice": {"type": "function"}}, "name a function"),
        ({"tool_choice": {}}, "name a function"),
        ({"tool_choice": {"type": 3}}, "not supported"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "`allowed_tools`"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "`custom`"),
        ({"tools": [tool(), tool()]}, "twice"),
        ({"tools": [tool(name="")]}, "names"),
        ({"tools": [tool(name=" f")]}, "names"),
        ({"tools": [tool(name="a\nb")]}, "names"),
        ({"tools": [tool(name="f" * 129)]}, "names"),
        ({"tools": [tool(name="no_tool")]}, "`no_tool`"),
        ({"tools": [tool(name=str(index)) for index in range(257)]}, "256"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "type `function`"),
        ({"tools": [tool(parameters=[])]}, "`f`"),
        ({"tools": [tool(parameters={"type": "array"})]}, "`f`"),
        ({"tools": [tool(parameters={"properties": {"_name": {}}})]}, "`_name`"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused_as_a_tool_error(router: Router, fields: dict[str, Any], word: str, stream: bool) -> None:
    answer = await router.post(PATH, body(stream=stream, **fields))
    assert is_invalid(answer)
    assert answer.json()["error_type"] == "tool_error" and word in message_of(answer)
    assert answer.json()["error"]["type"] == "invalid_request_error"
    router.assert_idle()


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "image_url", "image_url": "https://x/y.png"}, "image_url: Input should be a JSON object"),
        (
            {"type": "image_url", "image_url": {"url": "x", "detail": "medium"}},
            "detail: Input should be 'auto', 'high'",
        ),
        ({"type": "input_audio"}, "'input_audio'"),
        ("Hello", "messages[0].content[0]: "),
    ],
)
async def test_what_is_wrong_with_a_part_of_a_message_is_named(router: Router, part: Any, word: str) -> None:
    """Not that a text could be in the place of all parts."""
    answer = await router.post(PATH, {"messages": [{"role": "user", "content": [part]}]})
    assert is_invalid(answer)
    assert word in message_of(answer) and "valid string" not in message_of(answer)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": {}}, {"tools": [3]}, {"tools": ["f"]}, {"tools": [{}]}, {"tools": [{"function": {}}]},
        {"tools": [tool(name=3)]}, {"tools": [tool(description=3)]},
        {"tools": [{"type": 3, "function": {"name": "f"}}]},
        {"tools": [{"type": "web_search"}]}, {"tool_choice": 3}, {"tool_choice": ["f"]}, {"tool_choice": True},
        {"tool_prompt": 3}, {"parallel_tool_calls": 1}, {"chat_template_kwargs": []}, {"reasoning_effort": 3},
        {"tools": [tool(strict="yes")]},
        {"tools": [tool(parameters={"properties": {"a": {"not": {"pattern": "x"}}}, "required": ["a"]})]},
        {"tools": [tool(parameters={"properties": {"a": {"type": "nothing"}}})]},
        {"tools": [tool(parameters={"properties": {"a": {"$ref": "http://127.0.0.1/x"}}})]},
        {"tools": [tool(parameters={"properties": {"a": {"$ref": "#/$defs/x"}}})]},
        {"tools": [tool(parameters={"properties": {"a": {"pattern": "(?=a)", "type": "string"}}})]},
        {"messages": []}, {"messages": {}}, {"messages": "x"}, {"messages": [3]}, {"messages": [{}]},
        {"messages": [{"content": "x"}]}, {"messages": [{"role": 3, "content": "x"}]},
        {"messages": [{"role": "", "content": "x"}]}, {"messages": [{"role": "r" * 65, "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]}, {"messages": [{"role": "user", "content": {}}]},
        {"messages": [{"role": "user", "content": [3]}]}, {"messages": [{"role": "user", "content": [{}]}]},
        {"messages": [{"role": "user", "content": [{"type": "audio", "audio": ""}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": {}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": "f"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "3", "function": {"name": 3}}]}]},
        {"messages": [{"role": "tool", "tool_call_id": 3, "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": 3}]},
        {"messages": [{"role": "user", "content": "x"}] * 10_001},
        {"chat_template_kwargs": {"messages": []}}, {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": {"bos_token": ""}}, {"chat_template_kwargs": {"raise_exception": 1}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
    ],
)  # fmt: skip
async def test_malformed(router: Router, fields: dict[str, Any]) -> None:
    answer = await router.post(PATH, body(**fields))
    assert is_invalid(answer), answer.text
    assert list(answer.json()) == ["error", "error_type"] and answer.json()["error_type"] == "validation"
    router.assert_idle()


async def test_a_prompt_of_ten_thousand_messages(make_router: MakeRouter) -> None:
    router = make_router()
    answer = await router.post(PATH, {"messages": [{"role": "user", "content": "x"}] * 10_000})
    assert is_invalid(answer) and "tokens" in message_of(answer)
    router.assert_idle()


async def test_variables_of_the_template(make_router: MakeRouter) -> None:
    template = "{{ enable_thinking }}{{ reasoning_effort }}{{ self }}{{ messages[0].content }}"
    router = make_router(templates={"default": template.replace("{{ self }}", "")})
    await router.post(PATH, body(tools=None, chat_template_kwargs={"enable_thinking": False, "self": 1}))
    assert router.scheduler.last.inputs == "FalseHello"
    await router.post(PATH, body(tools=None, reasoning_effort="low"))
    assert router.scheduler.last.inputs == "lowHello"
