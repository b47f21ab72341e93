"""What the model sees of tools: examples, deferred ones, what they return; on the routes that have such keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, is_invalid, message_of
from tool_chats import PARAMETERS, script

from router.answers.formats.choice import ModelFormat
from router.answers.formats.markers import Markers
from router.answers.formats.reasoning import named as style_named
from router.answers.formats.table import FORMATS

Keys = dict[str, Any]
Show = Callable[..., Any]
DEFERRED: Keys = {"name": "list_files", "input_schema": PARAMETERS, "defer_loading": True}
SEARCH: Keys = {"name": "find_tools", "input_schema": PARAMETERS}
OF_ANTHROPIC: Keys = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
REFERENCE: Keys = {"type": "tool_reference", "tool_name": "list_files"}
FOUND: list[Keys] = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "find_tools", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [REFERENCE]}]},
]


@pytest.fixture
def shown(make_router: Callable[..., Router]) -> Show:
    """The functions in the prompt of a body, as the template has them."""
    chosen = ModelFormat(format=FORMATS["hermes"], style=style_named("think"), markers=Markers((), {}))

    async def show(path: str, **fields: Any) -> list[Keys]:
        router = make_router(script(["Hi", "</s>"]), templates={"default": "{{ tools | tojson }}"}, model_format=chosen)
        answer = await router.post(path, {"model": "tgi"} | fields)
        assert answer.status_code == 200, answer.text
        return [tool["function"] for tool in json.loads(router.scheduler.last.inputs)]

    return show


async def shown_names(shown: Show, *tools: Keys, turns: list[Keys] | None = None, **fields: Any) -> list[str]:
    messages = [{"role": "user", "content": "Hi"}, *(turns or [])]
    functions = await shown("/v1/messages", max_tokens=9, messages=messages, tools=list(tools), **fields)
    return [function["name"] for function in functions]


async def test_examples_stand_behind_the_description(shown: Show) -> None:
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    tool = SEARCH | {"input_examples": [{"city": "Paris"}, {"city": "Rome"}]}
    described, plain = await shown(
        "/v1/messages", tools=[tool | {"description": "Finds."}, tool | {"name": "b"}], **asked
    )
    assert described["description"] == 'Finds.\nExamples of its input:\n{"city":"Paris"}\n{"city":"Rome"}'
    assert plain["description"] == 'Examples of its input:\n{"city":"Paris"}\n{"city":"Rome"}'


async def test_a_deferred_tool_is_shown_once_it_is_found(shown: Show) -> None:
    assert await shown_names(shown, SEARCH, DEFERRED) == ["find_tools"]
    assert await shown_names(shown, SEARCH, DEFERRED, turns=FOUND) == ["find_tools", "list_files"]
    named = {"tool_choice": {"type": "tool", "name": "list_files"}}
    # A choice of one tool shows that tool alone.
    assert await shown_names(shown, SEARCH, DEFERRED, **named) == ["list_files"]


async def test_a_deferred_tool_that_no_client_could_find_is_shown_at_once(shown: Show) -> None:
    assert await shown_names(shown, SEARCH, DEFERRED, OF_ANTHROPIC) == ["find_tools", "list_files"]
    assert await shown_names(shown, DEFERRED) == ["list_files"]


async def test_deferred_tools_of_responses(shown: Show) -> None:
    function = {"type": "function", "name": "list_files", "parameters": PARAMETERS, "defer_loading": True}
    space = {"type": "namespace", "name": "files", "tools": [function | {"name": "read"}, {**function, "name": "b"}]}
    space["tools"][1].pop("defer_loading")
    tools = [function, space]
    search = {"type": "tool_search", "parameters": PARAMETERS}
    for of_server in ([], [search | {"execution": "server"}]):
        functions = await shown("/v1/responses", input="Hi", tools=[*tools, *of_server])
        assert [one["name"] for one in functions] == ["list_files", "read", "b"]
    asked = {"tools": [*tools, search | {"execution": "client"}]}
    functions = await shown("/v1/responses", input="Hi", **asked)
    assert [one["name"] for one in functions] == ["b", "tool_search"]
    found = [
        {"role": "user", "content": "Hi"},
        {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": [function]},
    ]
    functions = await shown("/v1/responses", input=found, **asked)
    assert [one["name"] for one in functions] == ["b", "tool_search", "list_files"]


async def test_templates_see_what_a_function_returns(shown: Show) -> None:
    function = {"name": "f", "parameters": PARAMETERS}
    asked: Keys = {"messages": [{"role": "user", "content": "Hi"}]}
    (with_it,) = await shown(
        "/v1/chat/completions",
        tools=[{"type": "function", "function": function | {"return": {"type": "string"}}}],
        **asked,
    )
    (without,) = await shown("/v1/chat/completions", tools=[{"type": "function", "function": function}], **asked)
    assert with_it == without | {"return": {"type": "string"}}
    (of_responses,) = await shown(
        "/v1/responses", input="Hi", tools=[{"type": "function", "output_schema": {"type": "string"}} | function]
    )
    assert of_responses == with_it


async def test_strict_tools_are_strict_on_every_route(make_router: Callable[..., Router]) -> None:
    """A schema that no grammar holds is refused, also where calls would be free."""
    chosen = ModelFormat(format=FORMATS["hermes"], style=style_named("think"), markers=Markers((), {}))
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    named = {"name": "f", "strict": True}
    turns: Keys = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "model": "tgi"}
    bodies: list[tuple[str, Keys]] = [
        ("/v1/chat/completions", turns | {"tools": [{"type": "function", "function": named | {"parameters": schema}}]}),
        ("/v1/messages", turns | {"tools": [named | {"input_schema": schema}]}),
        ("/v1/responses", {"input": "Hi", "tools": [named | {"type": "function", "parameters": schema}]}),
    ]
    for path, body in bodies:
        router = make_router(script(["Hi", "</s>"]), templates={"default": "x"}, model_format=chosen)
        answer = await router.post(path, body)
        assert is_invalid(answer) and "uniqueItems" in message_of(answer), (path, answer.text)
