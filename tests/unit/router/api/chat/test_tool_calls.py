"""Tool calls over `/v1/chat/completions`: JSON answers, chunks, templates that show tools, errors."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, data_of, is_invalid, says
from tool_chats import ARGUMENTS, CALL, NO_TOOL, OTHER, PARAMETERS, PATH, TOOL, body, deltas, script, tool

from router.events import Token

MakeRouter = Callable[..., Router]


@pytest.mark.parametrize(
    "choice",
    [None, "auto", "required", "get_weather", {"type": "function", "function": {"name": "get_weather"}},
     {"function": {"name": "get_weather"}}],
)  # fmt: skip
async def test_a_call(make_router: MakeRouter, choice: Any) -> None:
    router = make_router(script(CALL))
    answer = await router.post(PATH, body(tool_choice=choice))
    assert answer.status_code == 200
    (got,) = answer.json()["choices"]
    assert list(got) == ["index", "message", "logprobs", "finish_reason"]
    assert re.fullmatch("call_[0-9a-f]{24}", got["message"]["tool_calls"][0].pop("id"))
    function = {"description": None, "name": "get_weather", "arguments": ARGUMENTS}
    assert got == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"type": "function", "function": function}],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
    }
    (request,) = router.scheduler.submitted
    assert request.sampling.grammar_kind == "json"
    assert ('"no_tool"' in request.sampling.grammar) is (choice in (None, "auto"))
    assert ("get_time" in request.sampling.grammar) is (choice in (None, "auto", "required"))
    length = request.input_length
    assert answer.json()["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": 11,
        "total_tokens": length + 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    router.assert_idle()


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
async def test_a_streamed_call(make_router: MakeRouter, choice: str) -> None:
    router = make_router(script(CALL))
    asked = body(tool_choice=choice, stream=True, stream_options={"include_usage": True})
    events = data_of((await router.post(PATH, asked)).content)
    first, *pieces, last = deltas(events)
    assert re.fullmatch("call_[0-9a-f]{24}", first["tool_calls"][0].pop("id"))
    call = {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert first == {"role": "assistant", "content": None, "tool_calls": [call]}
    told = [piece["tool_calls"][0]["function"]["arguments"] for piece in pieces]
    assert told == ['{"ci', 'ty":"Par', 'is","n":3', "}"]
    assert all(piece == {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
               for piece, text in zip(pieces, told, strict=True))  # fmt: skip
    assert last == {}
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-2]]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    length = router.scheduler.last.input_length
    usage = {
        "prompt_tokens": length,
        "completion_tokens": 11,
        "total_tokens": length + 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert events[-2]["choices"] == [] and events[-2]["usage"] == usage and events[-1] == "[DONE]"
    router.assert_idle()


@pytest.mark.parametrize(
    ("choice", "pieces", "reason", "name", "arguments", "said"),
    [
        ("required", CALL[:7], "length", "get_weather", '{"city":"Par', "length"),
        ("auto", CALL[:5], "length", "get_weather", "", "length"),
        ("get_weather", CALL[:2], "length", "get_weather", "", "length"),
        ("required", CALL[:2], "length", None, "", "length"),
        ("required", CALL[:9], "length", "get_weather", ARGUMENTS, "length"),
        ("required", CALL[:10], "length", "get_weather", ARGUMENTS, "tool_calls"),
        ("required", [*CALL[:6], 'ty": "STOP'], "stop_sequence", "get_weather", '{"city":"', "stop"),
        ("required", [*CALL[:6], 'ty": "STOP'], "length", "get_weather", '{"city":"', "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_was_cut(
    make_router: MakeRouter, choice: str, pieces: Any, reason: Any, name: Any, arguments: str, said: str, stream: bool
) -> None:
    router = make_router(lambda request: says(*pieces, reason=reason))
    answer = await router.post(PATH, body(tool_choice=choice, stream=stream, stop="STOP"))
    assert answer.status_code == 200
    if stream:
        events = data_of(answer.content)
        calls = [call["function"] for delta in deltas(events) for call in delta.get("tool_calls", [])]
        got = (calls[0]["name"] if calls else None, "".join(call["arguments"] for call in calls))
        finish_reason = events[-2]["choices"][0]["finish_reason"]
        assert deltas(events)[0]["role"] == "assistant" and deltas(events)[-1] == {}
    else:
        (one,) = answer.json()["choices"]
        calls = [call["function"] for call in one["message"].get("tool_calls", [])]
        got, finish_reason = (calls[0]["name"], calls[0]["arguments"]) if calls else (None, ""), one["finish_reason"]
    assert got == (name, arguments) and finish_reason == said
    router.assert_idle()


async def test_a_text_that_is_no_call_is_an_error(make_router: MakeRouter) -> None:
    router = make_router(script(["Hello", "</s>"], ["Hello", "</s>"]))
    answer = await router.post(PATH, body(tool_choice="required"))
    assert is_invalid(answer) and answer.json()["error_type"] == "tool_error" and "Hello" in answer.text
    events = data_of((await router.post(PATH, body(tool_choice="required", stream=True))).content)
    assert events[-2]["error_type"] == "tool_error" and events[-1] == "[DONE]"
    router.assert_idle()


async def test_logprobs_of_a_call_are_all_there(make_router: MakeRouter) -> None:
    top = (Token(1, "x", -0.1),)
    router = make_router(lambda request: says(*CALL, reason="eos_token", last_special=True, top_tokens=top))
    asked = body(logprobs=True, top_logprobs=1)
    (choice,) = (await router.post(PATH, asked)).json()["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == CALL
    events = data_of((await router.post(PATH, asked | {"stream": True})).content)
    parts = [event["choices"][0]["logprobs"]["content"] for event in events[:-1]]
    assert [token["token"] for part in parts for token in part] == CALL
    assert parts[0][0]["top_logprobs"] == [{"token": "x", "logprob": -0.1, "bytes": [120]}]


async def test_a_template_that_reads_tools_gets_them_and_nothing_is_added(make_router: MakeRouter) -> None:
    template = "{{ tools | tojson }}|{{ messages[-1].content }}"
    router = make_router(script(CALL, CALL, CALL), templates={"default": template})
    await router.post(PATH, body(tool_choice="required"))
    tools, content = router.scheduler.last.inputs.rsplit("|", 1)
    other = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
    assert json.loads(tools) == [TOOL, {"type": "function", "function": other}] and content == "Hello"
    await router.post(PATH, body(tool_choice="get_weather", tool_prompt="Call it!"))
    tools, content = router.scheduler.last.inputs.rsplit("|", 1)
    assert json.loads(tools) == [TOOL] and content == "Hello\n---\nCall it!"
    named = await router.post("/chat_tokenize", body(tool_choice="get_weather"))
    assert named.json()["templated_text"] == f"{tools}|Hello"


async def test_a_template_without_tools_gets_them_in_the_last_message(make_router: MakeRouter) -> None:
    router = make_router(script(CALL, CALL), templates={"default": "{{ messages[-1].content }}"})
    await router.post(PATH, body(tools=[TOOL]))
    lines = router.scheduler.last.inputs.split("\n")
    assert lines[:2] == ["Hello", "---"] and json.loads(lines[2]) == [TOOL] and "JSON" in "".join(lines[3:])
    await router.post(PATH, body(tools=[TOOL], tool_prompt="Mine"))
    assert router.scheduler.last.inputs.split("\n")[3:] == ["Mine"]


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None}, {"tool_choice": "none"}])
async def test_plain_chat(make_router: MakeRouter, fields: dict[str, Any]) -> None:
    router = make_router()
    answer = await router.post(PATH, body(**fields))
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": " one two", "refusal": None}
    assert router.scheduler.last.sampling.grammar_kind == "none"
    assert router.scheduler.last.inputs == "<|user|>Hello\n<|assistant|>"


async def test_vertex_gets_the_call_as_text_and_words_as_words(make_router: MakeRouter) -> None:
    router = make_router(script(CALL, NO_TOOL, ["Hi", "</s>"]))
    answer = await router.post("/vertex", {"instances": [body(tool_choice="required")]})
    assert json.loads(answer.json()["predictions"][0]) == {"function": {"_name": "get_weather"} | json.loads(ARGUMENTS)}
    assert (await router.post("/vertex", {"instances": [body()]})).json() == {"predictions": ["Hi"]}
    router.assert_idle()


_WRONG = [
    None,
    True,
    3,
    -1.5,
    "",
    "x",
    "required",
    [],
    ["x"],
    {},
    {"a": 1},
    {"type": "object"},
    {"$ref": "#"},
    [[]],
    2**63,
]


def mutated(source: random.Random, node: Any) -> Any:
    """A copy with one place changed, removed or moved."""
    if isinstance(node, dict) and node and source.random() < 0.85:
        key = source.choice(list(node))
        kind = source.randrange(8)
        if kind == 0:
            return {name: value for name, value in node.items() if name != key}
        if kind == 1:
            return {**node, source.choice(["$ref", "anyOf", "properties", "_name", "name", "type"]): node[key]}
        return {**node, key: mutated(source, node[key])}
    if isinstance(node, list) and node and source.random() < 0.85:
        index = source.randrange(len(node))
        if source.randrange(6) == 0:
            return node + node[index : index + 1]
        return [mutated(source, one) if place == index else one for place, one in enumerate(node)]
    return source.choice(_WRONG)


@pytest.mark.parametrize("seed", range(3))
async def test_no_tool_body_gives_a_server_error(make_router: MakeRouter, seed: int) -> None:
    source = random.Random(seed)
    router = make_router(lambda request: says(*source.choice([CALL, NO_TOOL, ["x", "</s>"], CALL[:6]]),
                         reason="eos_token", last_special=True))  # fmt: skip
    history = [
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning_content": "b",
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "4", "name": "f"},
    ]  # fmt: skip
    parameters = {**PARAMETERS, "required": ["n"], "$defs": {"X": {"type": "integer"}},
                  "anyOf": [{"required": ["n"]}, {"$ref": "#/$defs/X"}]}  # fmt: skip
    whole = body(
        messages=[{"role": "user", "content": "Hello"}, *history],
        tools=[TOOL, OTHER, tool(parameters=parameters, strict=True)],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        chat_template_kwargs={"a": 1}, parallel_tool_calls=False, tool_prompt="x", reasoning_effort="low",
    )  # fmt: skip
    num_served = 0
    for _ in range(150):
        asked = whole
        for _ in range(source.randint(1, 3)):
            asked = mutated(source, asked)
        path = source.choice([PATH, PATH, "/invocations", "/chat_tokenize"])
        if isinstance(asked, dict) and source.random() < 0.3:
            asked = asked | {"stream": True}
        answer = await router.post(path, asked)
        assert answer.status_code == 200 or is_invalid(answer), (path, asked, answer.text)
        num_served += answer.status_code == 200
        router.assert_idle()
    assert 10 < num_served < 140, "the bodies reach every layer"


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "regex", "value": "a+"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_ignores_the_form_of_answers(
    make_router: MakeRouter, form: dict[str, Any], stream: bool
) -> None:
    router = make_router(script(CALL))
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        router.scheduler.script = script(CALL)
        answer = await router.post(PATH, body(response_format=form, tool_choice=choice, stream=stream))
        assert answer.status_code == 200 and "get_weather" in answer.text
        assert len(router.scheduler.submitted) == 1 and "_name" in router.scheduler.last.sampling.grammar
        router.scheduler.submitted.clear()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_beside_tools_is_a_call_or_fits_the_form(make_router: MakeRouter, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "integer"}}}}}
    for passes, says_so in (((CALL,), "get_weather"), ((NO_TOOL, ['{"a":', "1}", "</s>"]), "1}")):
        router = make_router(script(*passes))
        answer = await router.post(PATH, body(response_format=form, stream=stream))
        assert answer.status_code == 200 and says_so in answer.text
        assert len(router.scheduler.submitted) == len(passes)
        assert len(passes) == 1 or '"a"' in router.scheduler.last.sampling.grammar


async def test_a_form_that_no_answer_can_have_is_refused_beside_tools(router: Router) -> None:
    """Before the model decides whether it calls one."""
    for form in ({"type": "regex", "value": "("}, {"type": "json_object", "value": {"not": {}}}):
        answer = await router.post(PATH, body(response_format=form, stream=True))
        assert is_invalid(answer) and router.scheduler.submitted == []
