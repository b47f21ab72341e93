"""`/v1/responses`: whole answers, streams, errors, the body that Codex sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import orjson
import pytest
from pydantic import BaseModel
from router_fakes import Router, failing, message_of, says
from test_messages_route import ANSWER, TEMPLATE, events_of
from tool_chats import PARAMETERS, script

from router.answers.formats.choice import ModelFormat
from router.answers.formats.markers import Markers
from router.answers.formats.reasoning import named as style_named
from router.answers.formats.table import FORMATS
from router.errors import GenerationError

MakeRouter = Callable[..., Router]

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "input": "Hello"} | fields


@pytest.fixture
def make_native(make_router: MakeRouter) -> MakeRouter:
    def make(*answers: list[str], **options: Any) -> Router:
        chosen = ModelFormat(format=FORMATS["hermes"], style=style_named("think"), markers=Markers((), {}))
        return make_router(script(*answers), **({"templates": {"default": TEMPLATE}, "model_format": chosen} | options))

    return make


def checked(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The last response of a stream, whose events follow the rules that openai's client relies on."""
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    open_id: str | None = None
    for name, event in events[2:-1]:
        kind = name.removeprefix("response.")
        if kind == "output_item.added":
            assert open_id is None and event["output_index"] == len(items)
            items.append(event["item"])
            open_id = event["item"]["id"]
            texts[open_id] = ""
        elif kind == "output_item.done":
            assert event["item"]["id"] == open_id and event["output_index"] == len(items) - 1
            items[-1], open_id = event["item"], None
        else:
            assert event["item_id"] == open_id and event["output_index"] == len(items) - 1
            if kind.endswith(".delta"):
                texts[str(open_id)] += event["delta"]
            if kind.startswith("output_text"):
                assert isinstance(event["logprobs"], list)
    response: dict[str, Any] = events[-1][1]["response"]
    assert response["output"] == items and open_id is None
    for item in items:
        written = item.get("arguments", item.get("input")) if "content" not in item else item["content"][0]["text"]
        assert texts[item["id"]] == ("" if item["type"] == "tool_search_call" else written)
    assert response["id"] == events[0][1]["response"]["id"]
    return response


async def test_reasoning_text_and_calls_whole_and_streamed(make_native: MakeRouter) -> None:
    answers = []
    for stream in (False, True):
        router = make_native(ANSWER)
        asked = body(tools=TOOLS, stream=stream, include=["reasoning.encrypted_content"], metadata={"a": "b"})
        answer = await router.post(PATH, asked)
        assert answer.status_code == 200
        answers.append(checked(events_of(answer.content)) if stream else answer.json())
        router.assert_idle()
    for response in answers:
        assert response["id"].startswith("resp_") and (response["status"], response["store"]) == ("completed", False)
        ids = [item.pop("id") for item in response["output"]]
        assert [each.partition("_")[0] for each in ids] == ["rs", "msg", "fc", "fc"]
        calls = [item.pop("call_id") for item in response["output"] if item["type"] == "function_call"]
        assert len(set(calls)) == 2 and all(each.startswith("call_") for each in calls)
        assert {item.pop("status") for item in response["output"]} == {"completed"}
    whole, streamed = answers
    assert whole["output"] == streamed["output"] and whole["usage"] == streamed["usage"]
    reasoning, message, first, second = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me."}] and reasoning["summary"] == []
    assert message["content"] == [{"type": "output_text", "text": "One moment.", "annotations": [], "logprobs": []}]
    assert first == {"type": "function_call", "name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert (second["name"], second["arguments"]) == ("get_time", "{}")
    assert whole["usage"]["output_tokens"] == len(ANSWER)
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    assert whole["metadata"] == {"a": "b"} and whole["tools"] == TOOLS

    again = make_native(["Fine", "</s>"])
    unread = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}
    user = {"role": "user", "content": "Hi"}
    asked = body(input=[user, unread, {"role": "assistant", "content": "A"}, foreign, user])
    assert (await again.post(PATH, asked)).status_code == 200
    assert again.scheduler.last.inputs == "<user>Hi\n<assistant>(Let me.)A\n<user>Hi\n<assistant>"


async def test_what_comes_back_is_made_json_once(make_native: MakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is: each event copies it as it is."""
    written: list[Any] = []
    dumps = orjson.dumps

    def noted(value: Any, *others: Any, **options: Any) -> bytes:
        written.append(value)
        return dumps(value, *others, **options)

    monkeypatch.setattr("router.api.responses.writer.orjson.dumps", noted)
    router = make_native(ANSWER)
    many = [{**TOOLS[0], "name": f"tool_{number}", "description": "d" * 2000} for number in range(60)]
    answer = await router.post(PATH, body(tools=many, stream=True, instructions="i" * 100))
    whole = checked(events_of(answer.content))
    assert whole["tools"] == many and whole["instructions"] == "i" * 100
    lists = [value for value in written if isinstance(value, list) and len(value) == 60]
    assert len(lists) == 1, "the tools were made JSON more than once"
    shown = [value["response"]["tools"] for value in written if isinstance(value, dict) and "response" in value]
    assert len(shown) == 3 and all(isinstance(tools, orjson.Fragment) for tools in shown)


@pytest.mark.parametrize(
    "metadata", [{str(n): "" for n in range(17)}, {"n" * 65: ""}, {"a": "x" * 513}, {"a": 1}, {"a": {"b": "c"}}]
)
async def test_metadata_has_openais_bounds(router: Router, metadata: Any) -> None:
    assert (await router.post(PATH, body(metadata={str(n): "x" * 512 for n in range(16)}))).status_code == 200
    refused = await router.post(PATH, body(metadata=metadata))
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("metadata")


async def test_a_whole_conversation_reaches_the_template(make_native: MakeRouter) -> None:
    """As Codex sends it: instructions, a developer's message, calls of several kinds, tools of the server."""
    asked = {
        "model": "gpt-oss",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
            {"type": "function_call", "name": "shell", "arguments": '{"cmd":"ls"}', "call_id": "call_1", "id": "fc_1"},
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "call_2"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
            {
                "type": "custom_tool_call_output",
                "call_id": "call_2",
                "output": [{"type": "input_text", "text": "done"}],
            },
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "x", "strict": False, "parameters": PARAMETERS},
            PATCH,
            {"type": "namespace", "name": "mcp__docs", "tools": [{"type": "function", "name": "search"}]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a-key",
        "text": {"verbosity": "low"},
        "client_metadata": {"session": "x"},
    }
    router = make_native(["Fine", "</s>"])
    answer = await router.post(PATH, asked)
    assert answer.status_code == 200, answer.text
    response = checked(events_of(answer.content))
    assert [tool["type"] for tool in response["tools"]] == ["function", "custom", "namespace"]
    assert router.scheduler.last.inputs == (
        "[shell][apply_patch][search]<system>You are a coding agent.\n\nSandboxed.\n<user>Fix it.\n"
        "<assistant>(Look.)call_1=shell{'cmd': 'ls'}call_2=apply_patch{'input': '*** Begin'}\n"
        "<tool>a.pycall_1\n<tool>donecall_2\nmedium<assistant>"
    )


async def test_calls_of_custom_tools_and_of_namespaces(make_native: MakeRouter) -> None:
    text = 'a "b"\nc'
    written = [
        "<think></think><tool_call>\n" + json.dumps({"name": "apply_patch", "arguments": {"input": text}}),
        '\n</tool_call>\n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>', "</s>",
    ]  # fmt: skip
    tools = [PATCH, {"type": "namespace", "name": "mcp__docs", "tools": [{"type": "function", "name": "search"}]}]
    for stream in (False, True):
        answer = await make_native(written).post(PATH, body(tools=tools, stream=stream))
        output = (checked(events_of(answer.content)) if stream else answer.json())["output"]
        assert (output[0]["type"], output[0]["name"], output[0]["input"]) == ("custom_tool_call", "apply_patch", text)
        assert (output[1]["type"], output[1]["name"], output[1]["namespace"]) == (
            "function_call",
            "search",
            "mcp__docs",
        )


async def test_functions_of_one_name_in_several_namespaces(make_native: MakeRouter) -> None:
    search = {"type": "function", "name": "search"}
    spaces = [{"type": "namespace", "name": name, "tools": [search]} for name in ("mcp__a", "mcp__b")]
    call = '<think></think><tool_call>\n{"name": "mcp__b__search", "arguments": {}}\n</tool_call>'
    earlier = [
        {"type": "function_call", "name": "search", "namespace": name, "arguments": "{}", "call_id": name}
        for name in ("mcp__a", "mcp__b")
    ]
    named = {"type": "function", "name": "search", "namespace": "mcp__b"}
    for tools, first in ((spaces, "search"), ([*spaces, search], "mcp__a__search")):
        router = make_native([call, "</s>"], [call, "</s>"])
        asked = body(tools=tools, input=[{"role": "user", "content": "?"}, *earlier])
        (item,) = (await router.post(PATH, asked)).json()["output"]
        assert (item["name"], item["namespace"]) == ("search", "mcp__b")
        assert f"mcp__a={first}{{}}mcp__b=mcp__b__search{{}}" in router.scheduler.last.inputs
        (item,) = (await router.post(PATH, asked | {"tool_choice": named})).json()["output"]
        assert (item["name"], item["namespace"]) == ("search", "mcp__b")


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_stand_in_the_conversation(make_native: MakeRouter, stream: bool) -> None:
    """As Codex gives them: all in an item, custom tools in a namespace; and those that its search has found."""
    run = {"type": "custom", "name": "exec", "format": {"type": "text"}}
    listing = {"type": "function", "name": "list", "strict": False}
    spaces = [{"type": "namespace", "name": name, "tools": [run, listing]} for name in ("functions", "others")]
    search = {"type": "tool_search", "execution": "client", "description": "x", "parameters": PARAMETERS}
    found = {"type": "namespace", "name": "mcp__a", "tools": [{"type": "function", "name": "read"}]}
    found_again = {"type": "tool_search_output", "call_id": "call_3", "execution": "client", "tools": [found]}
    asked = {
        "tools": [search, {"type": "tool_search", "execution": "server"}, {"type": "web_search"}],
        "input": [
            {"type": "additional_tools", "role": "developer", "tools": spaces},
            {"role": "user", "content": "?"},
            {"type": "custom_tool_call", "name": "exec", "namespace": "others", "input": "1", "call_id": "call_1"},
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": "2"},
            {"type": "tool_search_call", "call_id": "call_2", "execution": "client", "arguments": {"query": "a"}},
            found_again | {"call_id": "call_2"},
            {"type": "tool_search_call", "execution": "server", "arguments": {}},
            found_again,
        ],
    }
    calls = [("others__exec", {"input": "3"}), ("read", {}), ("tool_search", {"query": "b"})]
    written = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': of})}\n</tool_call>\n" for name, of in calls]
    router = make_native(["<think></think>", *written, "</s>"])
    answer = await router.post(PATH, body(stream=stream, **asked))
    assert answer.status_code == 200, answer.text
    response = checked(events_of(answer.content)) if stream else answer.json()
    first, second, third = response["output"]
    assert (first["type"], first["name"], first["namespace"], first["input"]) == (
        "custom_tool_call", "exec", "others", "3",
    )  # fmt: skip
    assert (second["type"], second["name"], second["namespace"]) == ("function_call", "read", "mcp__a")
    kept = {name: third[name] for name in ("type", "execution", "arguments", "status")}
    assert kept == {
        "type": "tool_search_call", "execution": "client", "arguments": {"query": "b"}, "status": "completed",
    }  # fmt: skip
    assert [tool["type"] for tool in response["tools"]] == ["tool_search"]
    assert router.scheduler.last.inputs == (
        "[tool_search][exec][list][others__exec][others__list][read]<user>?\n"
        "<assistant>call_1=others__exec{'input': '1'}\n<tool>2call_1\n"
        "<assistant>call_2=tool_search{'query': 'a'}\n"
        '<tool>{"tools":["read"]}call_2\n<tool>{"tools":["read"]}call_3\n<assistant>'
    )


async def test_what_tools_of_other_servers_have_found_is_read_as_text(make_native: MakeRouter) -> None:
    """As on `/v1/messages`: before the text that follows, and no picture."""
    items = [
        {"role": "user", "content": "1"},
        {"type": "mcp_list_tools", "server_label": "a", "tools": [{"name": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "searching", "action": {"type": "search", "query": "q"}},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBO"},
        {"type": "mcp_call", "id": "mcp_1", "server_label": "a", "name": "b", "arguments": "{}", "output": "c"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
        {"type": "code_interpreter_call", "id": "ci_1", "code": "d", "container_id": "e", "outputs": None},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "4"},
    ]
    router = make_native(["5"])
    assert (await router.post(PATH, body(input=items))).status_code == 200
    assert router.scheduler.last.inputs == (
        '<user>1\n<assistant>(A)web_search: {"action":{"type":"search","query":"q"}}\n'
        'mcp: {"server_label":"a","name":"b","arguments":"{}","output":"c"}\n2\n<user>3\n'
        '<assistant>code_interpreter: {"code":"d"}\ncall_1=get_weather{}\n<tool>4call_1\n<assistant>'
    )


async def test_pictures_that_tools_of_other_servers_made_are_no_text(make_native: MakeRouter) -> None:
    picture = {"type": "image", "url": "data:image/png;base64,iVBO"}
    logs = {"type": "logs", "logs": "data: 5", "thumbnail": "data:image/png;base64,iVBO"}
    items = [
        {"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "outputs": [picture]},
        {"type": "code_interpreter_call", "id": "ci_2", "outputs": [picture, logs], "preview": picture["url"]},
    ]
    router = make_native(["5"])
    assert (await router.post(PATH, body(input=[*items, {"role": "user", "content": "?"}]))).status_code == 200
    found = '<assistant>code_interpreter: {"outputs":[{"type":"logs","logs":"data: 5"}]}\n\n<user>?\n<assistant>'
    assert router.scheduler.last.inputs == found


SEARCH = {"type": "web_search_call", "query": "q"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"}
FOUND = 'web_search: {"query":"q"}\n'


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([SEARCH, "A", "B"], [f"{FOUND}A", "B"]),
        ([SEARCH, "A", SEARCH, "C"], [f"{FOUND}A", f"{FOUND}C"]),
        ([SEARCH, SEARCH, "A"], [f"{FOUND}{FOUND}A"]),
        ([SEARCH, CALL, "A"], [f"{FOUND}call_1=get_weather{{}}", "A"]),
        ([SEARCH, CALL, SEARCH, "A"], [f"{FOUND}call_1=get_weather{{}}", f"{FOUND}A"]),
        ([SEARCH, "A", CALL], [f"{FOUND}Acall_1=get_weather{{}}"]),
    ],
)
async def test_what_was_found_joins_the_next_text_alone(
    make_native: MakeRouter, items: list[Any], turns: list[str]
) -> None:
    router = make_native(["5"])
    given = [{"role": "assistant", "content": item} if isinstance(item, str) else item for item in items]
    assert (await router.post(PATH, body(input=[*given, {"role": "user", "content": "?"}]))).status_code == 200
    seen = "".join(f"<assistant>{turn}\n" for turn in turns)
    assert router.scheduler.last.inputs == f"{seen}<user>?\n<assistant>"


async def test_reasoning_of_earlier_turns_is_left_out_where_the_client_says_so(make_native: MakeRouter) -> None:
    thoughts = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]} for text in "AB"
    ]
    turns = [
        {"role": "user", "content": "1"}, thoughts[0], {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"}, thoughts[1], {"role": "assistant", "content": "4"},
    ]  # fmt: skip
    router = make_native(*[["Fine", "</s>"]] * 3)
    for context, seen in (("current_turn", "B"), ("all_turns", "AB"), ("auto", "AB")):
        answer = await router.post(PATH, body(input=turns, reasoning={"context": context}))
        assert answer.status_code == 200, answer.text
        assert [text for text in "AB" if f"({text})" in router.scheduler.last.inputs] == list(seen)


async def test_an_answer_that_is_cut_is_incomplete(make_router: MakeRouter) -> None:
    for stream in (False, True):
        router = make_router(lambda request: says("Hi", " there", reason="length"))
        answer = await router.post(PATH, body(stream=stream, max_output_tokens=2))
        response = checked(events_of(answer.content)) if stream else answer.json()
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][0]["status"] == "incomplete"


async def test_the_form_of_an_answer(make_router: MakeRouter) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "one", "schema": schema, "strict": True}
    router = make_router(lambda request: says('{"a": 1}', "</s>", reason="eos_token", last_special=True))
    answer = (await router.post(PATH, body(text={"format": form}))).json()
    assert answer["output"][0]["content"][0]["text"] == '{"a": 1}' and answer["text"]["format"] == form
    assert router.scheduler.last.sampling.grammar_kind == "json"


@pytest.mark.parametrize(
    ("fields", "says_so"),
    [
        ({"previous_response_id": "resp_1"}, "send the whole conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "send the whole conversation"),
        ({"conversation": "conv_1"}, "send the whole conversation"),
        ({"input": [{"id": "msg_1"}]}, "send the whole conversation"),
        ({"background": True}, "`background` is not served here"),
        ({"prompt": {"id": "x"}}, "`prompt` is not served here"),
        ({"truncation": "auto"}, "`truncation` is not served here"),
        ({"max_tool_calls": 3}, "`max_tool_calls` is not served here"),
        ({"input": []}, "at least one item"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "has a fault: `messages` must hold at least one message"),
        ({"input": [{"type": "computer_call"}]}, "`type` must be one of 'message', 'function_call'"),
        ({"input": [{"type": None}]}, "input[0]: `type` is missing"),
        ({"input": [5]}, "input[0]: Input should be a JSON object"),
        ({"text": {"format": {"type": "json_schema"}}}, "`schema` belongs"),
        ({"text": {"format": {"type": "xml"}}}, "json_object"),
        ({"tool_choice": {"type": "web_search"}}, "`tool_choice` must be"),
        ({"tools": [{"type": "function"}]}, "needs `name`"),
        ({"input": [{"role": "user", "content": "Hi"}] * 10_001}, "10000"),
    ],
)
async def test_refusals_have_the_form_of_the_api(router: Router, fields: dict[str, Any], says_so: str) -> None:
    answer = await router.post(PATH, body(**fields))
    assert answer.status_code == 400, answer.text
    assert says_so in message_of(answer) and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_texts(make_native: MakeRouter, stream: bool) -> None:
    """Those of its text and of no reasoning; with a stop text that comes in pieces each token is there once."""
    router = make_native(["<think>", "Hm.", "</think>", "Fi", "ne", " EN", "x", "</s>"])
    asked = body(stream=stream, include=["message.output_text.logprobs"], top_logprobs=1, stop="END")
    answer = await router.post(PATH, asked)
    response = checked(events_of(answer.content)) if stream else answer.json()
    assert router.scheduler.last.top_n_tokens == 1 and response["top_logprobs"] == 1
    (part,) = response["output"][-1]["content"]
    assert "".join(one["token"] for one in part["logprobs"]).endswith(part["text"]) and part["text"] == "Fine ENx"
    assert all(set(one) == {"token", "logprob", "bytes", "top_logprobs"} for one in part["logprobs"])
    if stream:
        events = [event for name, event in events_of(answer.content) if name == "response.output_text.delta"]
        assert [one for event in events for one in event["logprobs"]] == part["logprobs"]
    refused = await router.post(PATH, body(top_logprobs=2))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_logprobs"
    for wrong in (5, {"role": "user", "content": "Hi"}):
        refused = await router.post(PATH, body(input=wrong))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
        assert message_of(refused) == "input: Input should be a string or a list"
    unknown = await router.post(PATH, body(include=["everything"]))
    assert unknown.status_code == 400 and "file_search_call.results" in message_of(unknown)


async def test_the_values_in_force_come_back(make_router: MakeRouter) -> None:
    router = make_router(sampling_defaults={"temperature": 0.6, "top_k": 20})
    whole = (await router.post(PATH, body())).json()
    assert (whole["temperature"], whole["top_p"]) == (0.6, 1.0)
    whole = (await router.post(PATH, body(temperature=0, top_p=0.5))).json()
    assert (whole["temperature"], whole["top_p"]) == (0, 0.5)
    assert whole["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


async def test_input_tokens_are_those_of_the_answer(make_native: MakeRouter) -> None:
    router = make_native(["Fine", "</s>"])
    asked = body(input=[{"role": "user", "content": "Hello"}], instructions="Be brief.", tools=TOOLS)
    counted = await router.post(f"{PATH}/input_tokens", asked)
    assert router.scheduler.submitted == []
    whole = (await router.post(PATH, asked)).json()
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": whole["usage"]["input_tokens"]}


async def test_neutral_values_are_accepted(router: Router) -> None:
    neutral = {"background": False, "truncation": "disabled", "previous_response_id": None, "top_logprobs": 0}
    assert (await router.post(PATH, body(**neutral))).status_code == 200
    for method in ("GET", "DELETE"):
        answer = await router.request(method, f"{PATH}/resp_1")
        assert answer.status_code == 404 and "not stored here" in answer.json()["error"]["message"]


async def test_a_failure_ends_a_stream(make_router: MakeRouter) -> None:
    router = make_router(lambda request: failing("Hi", error=GenerationError("out of memory")))
    answer = await router.post(PATH, body())
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    events = events_of((await router.post(PATH, body(stream=True))).content)
    assert [name for name, _ in events[-2:]] == ["error", "response.failed"]
    assert "out of memory" in events[-2][1]["message"]
    assert (events[-1][1]["response"]["status"], events[-1][1]["response"]["error"]["code"]) == (
        "failed",
        "server_error",
    )
    router.assert_idle()


async def test_too_many_requests_may_be_repeated(router: Router) -> None:
    with router.inference.take_permits(4, request_id="x"):
        answer = await router.post(PATH, body())
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1


class Point(BaseModel):
    x: int


async def test_openais_client(make_native: MakeRouter) -> None:
    """Its stream helper checks ids and places, and puts items together itself."""
    router = make_native(ANSWER, ANSWER)
    async with (
        router.listening() as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0) as client,
    ):
        whole = await client.responses.create(model="tgi", input="Hi", tools=TOOLS)
        async with client.responses.stream(model="tgi", input="Hi", tools=TOOLS) as stream:
            kinds = {event.type async for event in stream}
            streamed = await stream.get_final_response()
        assert whole.output_text == streamed.output_text == "One moment."
        for response in (whole, streamed):
            calls = [item for item in response.output if item.type == "function_call"]
            assert [(call.name, call.arguments) for call in calls] == [
                ("get_weather", '{"city": "Paris"}'), ("get_time", "{}"),
            ]  # fmt: skip
            assert response.usage is not None and response.usage.output_tokens == len(ANSWER)
        assert {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds
        router.scheduler.script = lambda request: says('{"x": 3}', "</s>", reason="eos_token", last_special=True)
        parsed = await client.responses.parse(model="tgi", input="Hi", text_format=Point)
        assert parsed.output_parsed == Point(x=3)
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            await client.responses.create(model="tgi", input="Hi", previous_response_id="resp_1")


async def test_allowed_tools_are_those_of_the_chat_route(make_native: MakeRouter) -> None:
    other = {"type": "function", "name": "get_time"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    call = '<think></think><tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    router = make_native([call, "</s>"])
    answer = await router.post(PATH, body(tools=[*TOOLS, other], tool_choice=choice))
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.inputs.startswith("[get_weather][get_time]")
    assert [item["name"] for item in answer.json()["output"]] == ["get_time"]
    assert "get_weather" not in router.scheduler.last.sampling.grammar


@pytest.mark.parametrize(("method", "path", "status"), [("GET", PATH, 405), ("GET", PATH + "/resp_1", 404)])
async def test_wrong_paths_and_methods_have_the_errors_of_this_api(
    router: Router, method: str, path: str, status: int
) -> None:
    answer = await router.request(method, path)
    assert message_of(answer) and answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
