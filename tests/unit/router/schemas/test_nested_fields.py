"""Keys of objects inside bodies: every row of the table, over HTTP, and every key that OpenAI's client knows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import chat, completion_create_params, responses, shared_params
from pydantic import BaseModel
from router_fakes import Router, is_invalid, message_of

from docs.generate.field_tables import text_of_keys
from router.api.chat.schema import ChatBody, FunctionDefinition, ImagePart, Message, Tool, ToolCall
from router.api.completions.schema import CompletionBody
from router.api.messages.blocks import (
    DocumentBlock,
    DocumentSource,
    ImageBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    ServerToolResultBlock,
    ServerToolUseBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.messages.schema import (
    InputMessage,
    MessagesBody,
    MessagesMetadata,
    MessagesTool,
    MessagesToolChoice,
    OutputConfig,
    Thinking,
)
from router.api.responses.input_items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    InputImage,
    InputText,
    MessageItem,
    ReasoningItem,
    ResponsesTool,
)
from router.api.responses.schema import ReasoningConfig, ResponsesBody, ResponsesStreamOptions, TextConfig
from router.schemas import unknown
from router.schemas.base import Body
from router.schemas.openai import StreamOptions, TextPart
from router.schemas.other_fields import HARMLESS, PLACES, REFUSED, Place

Keys = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION: Keys = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS: Keys = {"tools": [{"type": "function", "function": FUNCTION}]}
ANSWERED: list[Keys] = [{"role": "user", "content": "Hi"}]
NAMED: Keys = {"type": "function", "name": "f"}


def _chat(**fields: Any) -> Keys:
    return {"messages": ANSWERED, **fields}


def _turn(**fields: Any) -> Keys:
    return {"messages": [*ANSWERED, {"role": "assistant", **fields}, *ANSWERED]}


def _response(**fields: Any) -> Keys:
    return {"input": "Hi", **fields}


def _message(**fields: Any) -> Keys:
    return {"model": "m", "max_tokens": 5, "messages": ANSWERED, **fields}


def _text(kind: str, keys: Keys) -> Keys:
    return {"type": kind, "text": "a"} | keys


def _form(keys: Keys) -> Keys:
    return {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {}}} | keys}


CALL: Keys = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
CHOICE: Keys = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS["tools"]}}
OF_RESPONSES: Keys = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}
OBJECTS: dict[Place, tuple[str, str, Callable[[Keys], Keys]]] = {
    "chat messages": (CHAT, "messages[1]", lambda keys: _turn(content="Hello", **keys)),
    "chat content": (CHAT, "messages[1].content[0]", lambda keys: _turn(content=[_text("text", keys)])),
    "chat calls": (CHAT, "messages[1].tool_calls[0]", lambda keys: _turn(tool_calls=[{"function": FUNCTION, **keys}])),
    "chat tools": (CHAT, "tools[0].function", lambda keys: _chat(tools=[{"function": FUNCTION | keys}])),
    "chat tool_choice": (CHAT, "tool_choice", lambda keys: _chat(**TOOLS, tool_choice=CHOICE | keys)),
    "chat stream_options": (CHAT, "stream_options", lambda keys: _chat(stream_options=keys)),
    "chat response_format": (CHAT, "response_format", lambda keys: _chat(response_format=_form(keys))),
    "responses input": (RESPONSES, "input[0]", lambda keys: _response(input=[CALL | keys])),
    "responses content": (
        RESPONSES,
        "input[0].content[0]",
        lambda keys: _response(input=[{"role": "user", "content": [_text("input_text", keys)]}]),
    ),
    "responses tools": (RESPONSES, "tools[0]", lambda keys: _response(tools=[NAMED | keys])),
    "responses tool_choice": (
        RESPONSES,
        "tool_choice",
        lambda keys: _response(tools=[NAMED], tool_choice=OF_RESPONSES | keys),
    ),
    "responses reasoning": (RESPONSES, "reasoning", lambda keys: _response(reasoning=keys)),
    "responses stream_options": (RESPONSES, "stream_options", lambda keys: _response(stream_options=keys)),
    "messages messages": (MESSAGES, "messages[0]", lambda keys: _message(messages=[ANSWERED[0] | keys])),
    "messages content": (
        MESSAGES,
        "messages[0].content[0]",
        lambda keys: _message(messages=[{"role": "user", "content": [_text("text", keys)]}]),
    ),
    "messages tools": (MESSAGES, "tools[0]", lambda keys: _message(tools=[{"name": "f"} | keys])),
    "messages thinking": (MESSAGES, "thinking", lambda keys: _message(thinking={"type": "adaptive"} | keys)),
    "messages output_config": (MESSAGES, "output_config", lambda keys: _message(output_config=keys)),
}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The lines about unknown names."""
    monkeypatch.setattr(unknown, "_logged", set())
    caplog.set_level(logging.INFO, logger="router.schemas.unknown")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "router.schemas.unknown"]


def test_every_object_of_the_table_is_tried() -> None:
    assert OBJECTS.keys() == set(PLACES)


@pytest.mark.parametrize("place", PLACES)
async def test_what_would_change_the_answer_is_refused_by_name(router: Router, place: Place) -> None:
    path, where, made = OBJECTS[place]
    for name, refused in REFUSED[place].items():
        for value in ("x", {"a": 1}):
            answer = await router.post(path, made({name: value}))
            assert is_invalid(answer), (name, answer.text)
            assert message_of(answer).endswith(f"{where}: `{name}` is not served here: {refused.remedy}"), answer.text
    assert router.scheduler.submitted == []


@pytest.mark.parametrize("place", PLACES)
async def test_values_that_ask_for_nothing_and_harmless_keys_are_taken_in_silence(
    router: Router, place: Place, log: Callable[[], list[str]]
) -> None:
    path, _, made = OBJECTS[place]
    plain = made({})
    for refused in REFUSED[place].values():
        assert not any(map(refused.is_asked, (None, *refused.neutral)))
    keys: Keys = {name: refused.neutral[0] for name, refused in REFUSED[place].items() if refused.neutral}
    others = HARMLESS[place] - {"id", "name", "namespace", "status"}  # which are served at some of these objects
    for keys_of in (keys, {name: {"type": "x"} for name in others}):
        answer = await router.post(path, made(keys_of))
        assert answer.status_code == 200, (plain, answer.text)
    assert log() == []


@pytest.mark.parametrize("place", PLACES)
async def test_others_are_treated_as_at_the_top(router: Router, place: Place, log: Callable[[], list[str]]) -> None:
    path, _, made = OBJECTS[place]
    for _ in range(2):
        assert (await router.post(path, made({"banana": 1}))).status_code == 200
    (line,) = log()
    assert "unknown parameter `banana`" in line


@pytest.mark.parametrize(
    ("path", "body", "misspelt"),
    [
        (CHAT, OBJECTS["chat tool_choice"][2]({"funtcion": 1}), "funtcion"),
        (CHAT, OBJECTS["chat response_format"][2]({"shcema": 1}), "shcema"),
        (RESPONSES, OBJECTS["responses tool_choice"][2]({"namspace": 1}), "namspace"),
        (MESSAGES, _message(metadata={"user_idd": "a"}), "user_idd"),
        (MESSAGES, OBJECTS["messages tools"][2]({"input_example": []}), "input_example"),
    ],
)
async def test_misspelt_keys_are_refused(router: Router, path: str, body: Keys, misspelt: str) -> None:
    answer = await router.post(path, body)
    assert is_invalid(answer) and f"unknown parameter `{misspelt}`: did you mean" in message_of(answer), answer.text


@pytest.mark.parametrize(
    ("path", "tools"),
    [
        (MESSAGES, [{"type": "web_search_20260318", "name": "web_search", "max_uses": 3, "user_location": {}}]),
        (MESSAGES, [{"type": "bash_20250124", "name": "bash", "allowed_callers": ["code_execution_20260120"]}]),
        (RESPONSES, [{"type": "mcp", "server_label": "a", "server_url": "https://a", "allowed_callers": []}]),
        (RESPONSES, [{"type": "web_search", "filters": {"allowed_domains": ["a"]}, "search_context_size": "low"}]),
    ],
)
async def test_tools_that_are_left_out_are_left_out_with_all_their_keys(
    router: Router, path: str, tools: list[Keys], log: Callable[[], list[str]]
) -> None:
    body = _message(tools=tools) if path == MESSAGES else _response(tools=tools)
    answer = await router.post(path, body)
    assert answer.status_code == 200, answer.text
    assert log() == []


async def test_a_tool_that_only_code_may_call_is_refused(router: Router) -> None:
    for place, callers in (("messages tools", "code_execution_20260120"), ("responses tools", "programmatic")):
        path, where, made = OBJECTS[place]
        answer = await router.post(path, made({"allowed_callers": [callers]}))
        assert is_invalid(answer) and f"{where}: `allowed_callers` must hold `direct`" in message_of(answer)
        assert (await router.post(path, made({"allowed_callers": ["direct", callers]}))).status_code == 200


OF_OPENAI: list[tuple[Any, tuple[type[Body], ...]]] = [
    (chat.ChatCompletionAssistantMessageParam, (Message,)),
    (chat.ChatCompletionMessage, (Message,)),
    (chat.ChatCompletionUserMessageParam, (Message,)),
    (chat.ChatCompletionToolMessageParam, (Message,)),
    (chat.ChatCompletionContentPartTextParam, (TextPart,)),
    (chat.ChatCompletionContentPartImageParam, (ImagePart,)),
    (chat.ChatCompletionMessageFunctionToolCallParam, (ToolCall,)),
    (chat.ChatCompletionFunctionToolParam, (Tool,)),
    (chat.ChatCompletionCustomToolParam, (Tool,)),
    (chat.ChatCompletionStreamOptionsParam, (StreamOptions,)),
    (shared_params.FunctionDefinition, (FunctionDefinition,)),
    (shared_params.Reasoning, (ReasoningConfig,)),
    (responses.FunctionToolParam, (ResponsesTool,)),
    (responses.CustomToolParam, (ResponsesTool,)),
    (responses.NamespaceToolParam, (ResponsesTool,)),
    (responses.ToolSearchToolParam, (ResponsesTool,)),
    (responses.EasyInputMessageParam, (MessageItem,)),
    (responses.ResponseOutputMessageParam, (MessageItem,)),
    (responses.ResponseInputTextParam, (InputText,)),
    (responses.ResponseOutputTextParam, (InputText,)),
    (responses.ResponseInputImageParam, (InputImage,)),
    (responses.ResponseFunctionToolCallParam, (CallItem,)),
    (responses.response_input_item_param.FunctionCallOutput, (CallOutputItem,)),
    (responses.ResponseCustomToolCallParam, (CustomCallItem,)),
    (responses.ResponseReasoningItemParam, (ReasoningItem,)),
    (responses.ResponseTextConfigParam, (TextConfig,)),
    (responses.response_create_params.StreamOptions, (ResponsesStreamOptions,)),
    (responses.response_create_params.ResponseCreateParamsBase, (ResponsesBody,)),
    (chat.completion_create_params.CompletionCreateParamsBase, (ChatBody,)),
    (completion_create_params.CompletionCreateParamsBase, (CompletionBody,)),
]


OF_ANTHROPIC: list[tuple[type[Body], str]] = [
    (MessagesTool, "input_schema name allowed_callers cache_control defer_loading description eager_input_streaming "
     "input_examples strict type"),
    (MessagesToolChoice, "type name disable_parallel_tool_use"),
    (MessagesMetadata, "user_id"),
    (InputMessage, "role content clear_at output_config"),
    (TextBlock, "text type cache_control citations"),
    (ImageBlock, "source type cache_control transformations"),
    (DocumentBlock, "source type cache_control citations context title"),
    (DocumentSource, "type media_type data content"),
    (SearchResultBlock, "content source title type cache_control citations"),
    (ToolUseBlock, "id input name type cache_control caller toolset_name"),
    (ToolResultBlock, "tool_use_id type cache_control content is_error toolset_name"),
    (ToolReferenceBlock, "tool_name type cache_control"),
    (ServerToolUseBlock, "id input name type cache_control caller server_name"),
    (ServerToolResultBlock, "content tool_use_id type cache_control caller is_error"),
    (ThinkingBlock, "signature thinking type"),
    (RedactedThinkingBlock, "data type"),
    (Thinking, "type budget_tokens display block_binding"),
    (OutputConfig, "effort format task_budget"),
    (MessagesBody, "max_tokens messages model billing_policy cache_control compaction container context_management "
     "diagnostics fallback_credit_token fallbacks inference_geo mcp_servers metadata output_config service_tier speed "
     "stop_sequences system temperature thinking thread tool_choice tools top_k top_p stream betas user_profile_id "
     "workspace_id"),
]  # fmt: skip
"""The parameters of Anthropic's client 2.14."""


def test_every_key_that_anthropics_client_knows_is_decided() -> None:
    for body, keys in OF_ANTHROPIC:
        assert set(keys.split()) <= body.known_names | body.harmless_names, body


def _keys_of(theirs: Any) -> set[str]:
    if issubclass(theirs, BaseModel):
        return set(theirs.model_fields)
    return {*theirs.__required_keys__, *theirs.__optional_keys__}


def _unknown_of_openai() -> Iterator[str]:
    for theirs, bodies in OF_OPENAI:
        for body in bodies:
            known = body.known_names | body.harmless_names
            yield from (f"{theirs.__name__}.{key}" for key in _keys_of(theirs) - known)


def test_every_key_that_openais_client_knows_is_decided() -> None:
    assert sorted(_unknown_of_openai()) == []


def test_the_document_has_the_table() -> None:
    text = Path("docs/compatibility.md").read_text()
    found = re.search(r"<!-- keys -->\n(.*?)\n<!-- end of keys -->", text, re.DOTALL)
    assert found is not None and found[1] == text_of_keys(), "run `python -m docs.generate`"
