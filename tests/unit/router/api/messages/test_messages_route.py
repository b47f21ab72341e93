"""`/v1/messages` and `count_tokens`: whole answers, streams, errors, the body that Claude Code sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, failing, says
from tool_chats import PARAMETERS, script

from router.answers.formats.choice import ModelFormat
from router.answers.formats.markers import Markers
from router.answers.formats.reasoning import named as style_named
from router.answers.formats.table import FORMATS
from router.config import RouterConfig
from router.errors import GenerationError

MakeRouter = Callable[..., Router]

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}{{ c.function.arguments }}"
    "{% endfor %}{{ m.tool_call_id or '' }}\n{% endfor %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ reasoning_effort or '' }}<assistant>"
)
ANSWER = [
    "<think>", "Let", " me.", "</think>", "One", " moment.", "\n<tool_call>\n", '{"name": "get_weather", "argu',
    'ments": {"city": "Par', 'is"}}\n</tool_call>',
    '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "</s>",
]  # fmt: skip
TOOLS = [{"name": "get_weather", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]} | fields


def events_of(stream: bytes) -> list[tuple[str, Any]]:
    """Names and data, checked for their framing."""
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        events.append((value["type"], value))
    return events


def assembled(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together, checked for the order of its events."""
    (_, start), *rest = events
    message: dict[str, Any] = start["message"]
    open_index: int | None = None
    for kind, event in rest:
        if kind == "content_block_start":
            assert open_index is None and event["index"] == len(message["content"])
            open_index = event["index"]
            message["content"].append(event["content_block"] | {"json": ""})
        elif kind == "content_block_delta":
            assert event["index"] == open_index
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                block[delta["type"].removesuffix("_delta")] += delta[delta["type"].removesuffix("_delta")]
        elif kind == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
            written = message["content"][-1].pop("json")
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads(written)
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert open_index is None and rest[-1][0] == "message_stop"
    return message


@pytest.fixture
def make_native(make_router: MakeRouter) -> MakeRouter:
    def make(*answers: list[str], **options: Any) -> Router:
        chosen = ModelFormat(format=FORMATS["hermes"], style=style_named("think"), markers=Markers((), {}))
        return make_router(script(*answers), **({"templates": {"default": TEMPLATE}, "model_format": chosen} | options))

    return make


async def test_thinking_text_and_calls_whole_and_streamed(make_native: MakeRouter) -> None:
    answers = []
    for stream in (False, True):
        router = make_native(ANSWER)
        answer = await router.post(PATH, body(tools=TOOLS, stream=stream))
        assert answer.status_code == 200
        answers.append(assembled(events_of(answer.content)) if stream else answer.json())
        router.assert_idle()
    for message in answers:
        assert message["container"] is message["stop_details"] is None
        assert message["usage"]["service_tier"] == "standard" and message["usage"]["cache_creation"] is None
        assert message.pop("id").startswith("msg_")
        assert all(block.pop("id").startswith("toolu_") for block in message["content"] if block["type"] == "tool_use")
    whole, streamed = answers
    assert whole == streamed
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Let me.", "signature": ""},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "get_time", "input": {}},
    ]
    assert (whole["stop_reason"], whole["stop_sequence"], whole["role"]) == ("tool_use", None, "assistant")
    assert whole["usage"]["output_tokens"] == len(ANSWER) and whole["usage"]["input_tokens"] > 0


@pytest.mark.parametrize("kind", ["adaptive", "enabled"])
async def test_thinking_that_is_not_to_be_seen(make_native: MakeRouter, kind: str) -> None:
    for stream in (False, True):
        router = make_native(ANSWER)
        answer = await router.post(PATH, body(stream=stream, thinking={"type": kind, "display": "omitted"}))
        message = assembled(events_of(answer.content)) if stream else answer.json()
        assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
        assert "Let me" not in answer.text and "One moment." in message["content"][1]["text"]
        assert message["usage"]["output_tokens"] == len(ANSWER)


@pytest.mark.parametrize(
    ("reason", "text", "expected"),
    [
        ("eos_token", "Hi", ("end_turn", None)),
        ("length", "Hi", ("max_tokens", None)),
        ("stop_sequence", "Hi END", ("stop_sequence", "END")),
    ],
)
async def test_why_an_answer_ended(make_router: MakeRouter, reason: Any, text: str, expected: Any) -> None:
    router = make_router(lambda request: says("Hi", text.removeprefix("Hi") or "!", reason=reason))
    answer = (await router.post(PATH, body(stop_sequences=["END"]))).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected
    assert "END" not in answer["content"][0]["text"]
    assert router.scheduler.last.stopping.stop_sequences == ("END",)


async def test_a_whole_conversation_reaches_the_template(make_native: MakeRouter) -> None:
    """As Claude Code sends it: blocks, cache marks, a line of billing, tools of the server, thinking with a budget."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "18"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no network", "is_error": True}
    asked = body(
        stream=True,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"},
            {"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A call.", "signature": "abc"},
                    {"type": "redacted_thinking", "data": "abc"},
                    {"type": "text", "text": "Let me see."},
                    call,
                ],
            },
            {"role": "user", "content": [{"type": "text", "text": "Go on."}, result, failed]},
        ],
        tools=[*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        metadata={"user_id": "user_1"},
        max_tokens=32000,
        thinking={"type": "enabled", "budget_tokens": 31999},
        output_config={"effort": "high"},
        context_management={"edits": []},
        temperature=1,
    )
    router = make_native(["Fine", "</s>"])
    answer = await router.request(
        "POST", f"{PATH}?beta=true", json=asked, headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    )
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.inputs == (
        "[get_weather]<system>You are brief.\n<user>Weather?\n"
        "<assistant>(A call.)Let me see.toolu_1=get_weather{'city': 'Paris'}\n"
        "<tool>18toolu_1\n<tool>Error: no networktoolu_2\n<user>Go on.\nTruehigh<assistant>"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": ""}]}]}, "tool_use_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f", "input": {}}]}
                ]
            },
            "id",
        ),
    ],
)
async def test_what_anthropic_refuses_is_refused(router: Router, fields: dict[str, Any], param: str) -> None:
    answer = await router.post(PATH, body(max_tokens=50) | fields)
    assert answer.status_code == 400 and param in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("thinking", "max_tokens", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 20}, 50, "{0,20}"),
        ({"type": "enabled", "budget_tokens": 49}, 50, None),  # nothing would be left for an answer
        ({"type": "enabled"}, 50, None),
        ({"type": "adaptive", "budget_tokens": 20}, 50, None),
    ],
)
async def test_a_budget_of_thinking(
    make_native: MakeRouter, thinking: dict[str, Any], max_tokens: int, expected: str | None
) -> None:
    marks = {"<think>": 9, "</think>": 10}
    chosen = ModelFormat(style=style_named("think"), markers=Markers(marks, marks))
    router = make_native(["Fine", "</s>"], model_format=chosen)
    answer = await router.post(PATH, body(thinking=thinking, max_tokens=max_tokens))
    assert answer.status_code == 200, answer.text
    sampling = router.scheduler.last.sampling
    assert (expected in sampling.grammar) if expected else (sampling.grammar_kind == "none")


async def test_choices_of_tools(make_native: MakeRouter) -> None:
    for choice, kind in (({"type": "auto"}, "lark"), ({"type": "any"}, "lark"), ({"type": "none"}, "none")):
        router = make_native(ANSWER)
        answer = await router.post(PATH, body(tools=TOOLS, tool_choice=choice))
        assert answer.status_code == 200 and router.scheduler.last.sampling.grammar_kind == kind
    router = make_native(ANSWER)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    content = (await router.post(PATH, body(tools=TOOLS, tool_choice=choice))).json()["content"]
    assert [block["name"] for block in content if block["type"] == "tool_use"] == ["get_weather"]
    answer = await router.post(PATH, body(tools=TOOLS, tool_choice={"type": "tool", "name": "other"}))
    assert answer.status_code == 400 and "`other`" in answer.json()["error"]["message"]


async def test_a_call_that_is_cut_has_no_input(make_native: MakeRouter) -> None:
    router = make_native()
    router.scheduler.script = lambda request: says(*ANSWER[6:9], reason="length")
    answer = (await router.post(PATH, body(tools=TOOLS))).json()
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][-1]["name"] == "get_weather" and answer["content"][-1]["input"] == {}


async def test_tokens_are_counted(make_native: MakeRouter) -> None:
    router = make_native(["Hi", "</s>"])
    asked = body(tools=TOOLS, system="Be brief.")
    counted = (await router.post(COUNT, {name: asked[name] for name in asked if name != "max_tokens"})).json()
    assert counted == {"input_tokens": (await router.post(PATH, asked)).json()["usage"]["input_tokens"]}


def _document(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "document"} | fields]}]}


@pytest.mark.parametrize(
    ("fields", "says_so"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "at least one message"),
        (_document(source={}), "source"),
        (_document(source={"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}), "no files"),
        (_document(source={"type": "url", "url": "https://a/b.pdf"}), "no files"),
        (_document(source={"type": "file", "file_id": "file_1"}), "no files"),
        (_document(source={"type": "text"}), "needs `data`"),
        (_document(source={"type": "content"}), "needs `content`"),
        (_document(source={"type": "text", "data": "x"}, citations={"enabled": True}), "citations are not served"),
        ({"container": "c"}, "`container` is not served here"),
        ({"mcp_servers": [{"url": "x"}]}, "`mcp_servers` is not served here"),
        ({"top_p": 2.0}, "top_p"),
        ({"tool_choice": {"type": "tool"}}, "needs `name`"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]}, "needs `url`"),
    ],
)
async def test_refusals_have_the_form_of_the_api(router: Router, fields: dict[str, Any], says_so: str) -> None:
    answer = await router.post(PATH, body(**fields), x_request_id="a-request")
    assert answer.status_code == 400
    refusal = answer.json()
    assert (refusal["type"], refusal["error"]["type"], refusal["request_id"]) == (
        "error", "invalid_request_error", "a-request",
    )  # fmt: skip
    assert says_so in refusal["error"]["message"]


async def test_either_header_may_hold_the_key(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(tokenizer_name="some/model", api_key="secret"))
    assert (await router.post(PATH, body(), x_api_key="secret")).status_code == 200
    assert (await router.post(PATH, body(), authorization="Bearer secret")).status_code == 200
    for headers in ({}, {"x_api_key": "wrong"}):
        answer = await router.post(PATH, body(), **headers)
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    assert (await router.post("/generate", {"inputs": "Hi"}, x_api_key="secret")).status_code == 401


async def test_a_failure_ends_a_stream_with_an_error(make_router: MakeRouter) -> None:
    router = make_router(lambda request: failing("Hi", error=GenerationError("out of memory")))
    answer = await router.post(PATH, body())
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "api_error"
    name, event = events_of((await router.post(PATH, body(stream=True))).content)[-1]
    assert name == "error" and event["error"]["type"] == "api_error" and "out of memory" in event["error"]["message"]
    router.assert_idle()


async def test_too_many_requests_may_be_repeated(make_router: MakeRouter) -> None:
    router = make_router()
    with router.inference.take_permits(4, request_id="x"):
        answer = await router.post(PATH, body())
    assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("method", "path", "status"), [("GET", PATH, 405), ("POST", PATH + "/batches", 404)])
async def test_wrong_paths_and_methods_have_the_errors_of_this_api(
    router: Router, method: str, path: str, status: int
) -> None:
    answer = await router.request(method, path)
    body = answer.json()
    assert answer.status_code == status and body["type"] == "error" and body["request_id"]
    assert body["error"]["type"] == ("invalid_request_error" if status == 405 else "not_found_error")


async def test_what_anthropics_servers_have_done_is_read_as_text(make_native: MakeRouter) -> None:
    router = make_native(["Hi", "</s>"], templates={"default": TEMPLATE})
    found = [{"type": "web_search_result", "title": "Paris", "url": "https://a", "encrypted_content": "x"}]
    whole = {"type": "web_fetch_result", "content": {"source": {"type": "text", "data": "It rains."}, "title": "Rain"}}
    assistant = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "Paris"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": found},
        {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_2", "content": whole},
        {"type": "mcp_tool_use", "id": "mcp_1", "name": "lookup", "server_name": "a", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "mcp_1", "content": [{"type": "text", "text": "Found"}]},
        {"type": "text", "text": "So."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}},
    ]
    texts = [{"type": "text", "text": "Sunny"}, {"type": "text", "text": "Warm"}]
    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    result = {"type": "search_result", "source": "https://b", "title": "News", "content": texts, "citations": {}}
    user = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [reference, result]},
        result,
    ]
    history = [{"role": "assistant", "content": assistant}, {"role": "user", "content": user}]
    answer = await router.post(PATH, body(messages=history))
    assert answer.status_code == 200, answer.text
    news = "News\nhttps://b\nSunny\nWarm\n"
    assert router.scheduler.last.inputs == (
        '<assistant>web_search: {"query":"Paris"}\nParis\nhttps://a\nRain\nIt rains.\nlookup: {}\nFound\nSo.'
        "toolu_1=get_weather{}\n"
        f"<tool>get_weather\n{news}toolu_1\n<user>{news}\n<assistant>"
    )


async def test_documents_are_read_as_text(make_native: MakeRouter) -> None:
    router = make_native(["Hi", "</s>"], templates={"default": TEMPLATE})
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Paris: 2 million."}}
    named = plain | {"title": "Cities", "context": "An atlas.", "citations": {"enabled": False}}
    blocks = [{"type": "text", "text": "Rome: "}, {"type": "text", "text": "3 million."}]
    in_blocks = {"type": "document", "title": "More", "source": {"type": "content", "content": blocks}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [plain]}
    call = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
    asked = [result, named, in_blocks, plain, {"type": "text", "text": "Which is larger?"}]
    history = [{"role": "assistant", "content": [call]}, {"role": "user", "content": asked}]
    answer = await router.post(PATH, body(messages=history))
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.inputs == (
        "<assistant>toolu_1=read{}\n<tool>Paris: 2 million.\ntoolu_1\n<user>Cities\nAn atlas.\nParis: 2 million.\n"
        "More\nRome: 3 million.\nParis: 2 million.\nWhich is larger?\n<assistant>"
    )


async def test_a_system_turn_beside_system(make_native: MakeRouter) -> None:
    """With a template that takes one system message, at the beginning."""
    refuses = "{% if 'system' in messages[1:] | map(attribute='role') %}{{ raise_exception('first') }}{% endif %}"
    router = make_native(["Hi", "</s>"], templates={"default": refuses + TEMPLATE})
    history = [{"role": "user", "content": "Hello"}, {"role": "system", "content": "Be brief."}]
    answer = await router.post(PATH, body(messages=history, system="You help."))
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.inputs == "<system>You help.\n\nBe brief.\n<user>Hello\n<assistant>"
