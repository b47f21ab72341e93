"""Tools on `/v1/chat/completions`: one call, at once and streamed, the two passes of `auto`, what is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from router_fakes import Router, data_of, failing, says

from router.errors import GenerationError
from router.events import Event, Token
from router.generation.permits import HeldPermits, PermitPool
from router.openai.chat.two_passes import permits_of_one_pass
from router.request import ValidRequest

MakeRouter = Callable[..., Router]
PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "get_time"}}
CALL = ['{"', "function", '": {"_name', '": "get_', 'weather"', ', "ci', 'ty": "Par', 'is", "n": 3', "}", "}", "</s>"]
NO_TOOL = ['{"function": {"_name": "', "no_", 'tool"', "}}", "</s>"]
ARGUMENTS = '{"city":"Paris","n":3}'


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL, OTHER]} | fields


def script(*passes: Sequence[str]) -> Callable[[ValidRequest], list[Event]]:
    """Pieces of the constrained pass, then of the one in words; each ends with a special token."""
    left = list(passes)
    return lambda request: says(*left.pop(0), reason="eos_token", last_special=True)


def deltas(events: list[Any]) -> list[Any]:
    return [event["choices"][0]["delta"] for event in events if event != "[DONE]" and event["choices"]]


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
        "message": {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        "logprobs": None,
        "finish_reason": "tool_calls",
    }
    (request,) = router.scheduler.submitted
    assert request.sampling.grammar_kind == "json"
    assert ('"no_tool"' in request.sampling.grammar) is (choice in (None, "auto"))
    assert ("get_time" in request.sampling.grammar) is (choice in (None, "auto", "required"))
    length = request.input_length
    assert answer.json()["usage"] == {"prompt_tokens": length, "completion_tokens": 11, "total_tokens": length + 11}
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
    usage = {"prompt_tokens": length, "completion_tokens": 11, "total_tokens": length + 11}
    assert events[-2]["choices"] == [] and events[-2]["usage"] == usage and events[-1] == "[DONE]"
    router.assert_idle()


async def test_words_instead_of_a_call(make_router: MakeRouter) -> None:
    router = make_router(script(NO_TOOL, ["Hi", " there", "</s>"]))
    answer = await router.post(PATH, body(logprobs=True, seed=4))
    (got,) = answer.json()["choices"]
    assert got["message"] == {"role": "assistant", "content": "Hi there"} and got["finish_reason"] == "stop"
    assert [token["token"] for token in got["logprobs"]["content"]] == ["Hi", " there", "</s>"]
    first, second = router.scheduler.submitted
    assert "get_weather" in first.inputs and "get_weather" not in second.inputs
    assert first.sampling.grammar_kind == "json" and second.sampling.grammar_kind == "none"
    assert first.sampling.seed == second.sampling.seed == 4
    length = second.input_length
    assert answer.json()["usage"] == {"prompt_tokens": length, "completion_tokens": 3, "total_tokens": length + 3}
    assert answer.headers["x-prompt-tokens"] == str(length)
    assert router.metrics.render().count(b"\ntgi_request_count 1\n") == 1
    router.assert_idle()


async def test_words_in_a_stream(make_router: MakeRouter) -> None:
    router = make_router(script(NO_TOOL, ["Hi", " there", "</s>"]))
    asked = body(stream=True, logprobs=True, stream_options={"include_usage": True})
    events = data_of((await router.post(PATH, asked)).content)
    assert deltas(events) == [{"role": "assistant", "content": "Hi"}, {"content": " there"}, {"content": ""}]
    assert events[2]["choices"][0]["finish_reason"] == "stop"
    assert [event["choices"][0]["logprobs"]["content"][0]["token"] for event in events[:3]] == ["Hi", " there", "</s>"]
    assert events[3]["usage"]["completion_tokens"] == 3
    router.assert_idle()


async def test_one_permit_lasts_for_both_passes(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [None])
    permit_pool = router.inference.permit_pool
    taken: list[int] = []
    answers = [list(NO_TOOL), ["Hi", "</s>"]]

    def watched(request: ValidRequest) -> list[Event]:
        taken.append(permit_pool.num_taken)
        return says(*answers.pop(0), reason="eos_token", last_special=True)

    router.scheduler.script = watched
    permit_pool.take(3)  # all but one
    assert (await router.post(PATH, body())).status_code == 200
    assert taken == [3 + 1, 3 + 1] and permit_pool.num_taken == 3
    permit_pool.give_back(3)


def test_a_pass_belongs_to_the_request_that_it_is_for() -> None:
    permit_pool = PermitPool(1)
    assert permit_pool.take(1)
    span: Any = object()
    permits = HeldPermits(permit_pool, 1, "id", span)
    one = permits_of_one_pass(permits)
    assert (one.request_id, one.request_span, one.arrived_at) == ("id", span, permits.arrived_at)
    one.hand_over().give_back(1)
    assert permit_pool.num_taken == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decision_that_did_not_fit_is_for_words(make_router: MakeRouter, stream: bool) -> None:
    answers = [says('{"func', "tion", reason="length"), says("Hi", "!", reason="length")]
    router = make_router(lambda request: answers.pop(0))
    answer = await router.post(PATH, body(max_tokens=2, stream=stream))
    if stream:
        events = data_of(answer.content)
        assert [delta["content"] for delta in deltas(events)] == ["Hi", "!"]
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    else:
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == "Hi!" and choice["finish_reason"] == "length"
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
        ("required", [*CALL[:6], 'ty": "STOP'], "length", "get_weather", '{"city":"', "length"),
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
    assert answer.status_code == 422 and answer.json()["error_type"] == "tool_error" and "Hello" in answer.text
    events = data_of((await router.post(PATH, body(tool_choice="required", stream=True))).content)
    assert events[-2]["error"]["type"] == "tool_error" and events[-1] == "[DONE]"
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
    assert parts[0][0]["top_logprobs"] == [{"token": "x", "logprob": -0.1}]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_decide_each_for_itself(make_router: MakeRouter, stream: bool) -> None:
    def play(request: ValidRequest) -> list[Event]:
        if request.sampling.grammar_kind == "none":
            return says("w", str(request.sampling.seed), "</s>", reason="eos_token", last_special=True)
        pieces = CALL if request.sampling.seed == 6 else NO_TOOL
        return says(*pieces, reason="eos_token", last_special=True)

    router = make_router(play)
    answer = await router.post(PATH, body(n=3, seed=5, stream=stream))
    if not stream:
        choices = answer.json()["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["w5", None, "w7"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "tool_calls", "stop"]
        assert answer.json()["usage"]["completion_tokens"] == 3 + 11 + 3
    else:
        events = data_of(answer.content)
        reasons = {event["choices"][0]["index"]: event["choices"][0]["finish_reason"] for event in events[:-1]}
        assert reasons == {0: "stop", 1: "tool_calls", 2: "stop"}
    router.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_in_either_pass(make_router: MakeRouter, stream: bool) -> None:
    for num_before in (0, 1):
        passes = [says(*NO_TOOL, reason="eos_token", last_special=True)] * num_before
        passes.append(failing("a", error=GenerationError("boom")))
        router = make_router(lambda request, passes=passes: passes.pop(0))
        answer = await router.post(PATH, body(stream=stream))
        if stream:
            assert data_of(answer.content)[-2]["error"]["code"] == 424
        else:
            assert answer.status_code == 424
        router.assert_idle()


async def test_an_answer_in_words_whose_prompt_cannot_be_rendered(make_router: MakeRouter) -> None:
    template = "{% if not tools %}{{ raise_exception('tools only') }}{% endif %}x"
    router = make_router(script(NO_TOOL, NO_TOOL), templates={"default": template})
    answer = await router.post(PATH, body())
    assert answer.status_code == 422 and answer.json()["error_type"] == "template_error"
    events = data_of((await router.post(PATH, body(stream=True))).content)
    assert events[0]["error"]["type"] == "template_error"
    router.assert_idle()


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
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": " one two"}
    assert router.scheduler.last.sampling.grammar_kind == "none"
    assert router.scheduler.last.inputs == "<|user|>Hello\n<|assistant|>"


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


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
        ({"tools": [tool()], "response_format": {"type": "json_object"}}, "mutually exclusive"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused_as_a_tool_error(router: Router, fields: dict[str, Any], word: str, stream: bool) -> None:
    answer = await router.post(PATH, body(stream=stream, **fields))
    assert answer.status_code == 422
    assert answer.json()["error_type"] == "tool_error" and word in answer.json()["error"]
    assert answer.json()["error"].startswith("Tool error: ")
    router.assert_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": {}}, {"tools": [3]}, {"tools": ["f"]}, {"tools": [{}]}, {"tools": [{"function": {}}]},
        {"tools": [tool(name=3)]}, {"tools": [tool(description=3)]},
        {"tools": [{"type": 3, "function": {"name": "f"}}]},
        {"tools": [{"type": "web_search"}]}, {"tool_choice": 3}, {"tool_choice": ["f"]}, {"tool_choice": True},
        {"tool_prompt": 3}, {"parallel_tool_calls": 1}, {"chat_template_kwargs": []}, {"reasoning_effort": 3},
        {"tools": [tool(strict="yes")]},
        {"tools": [tool(parameters={"properties": {"a": {"not": {"type": "string"}}}, "required": ["a"]})]},
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
    assert answer.status_code == 422, answer.text
    assert list(answer.json()) == ["error", "error_type"] and answer.json()["error_type"] == "validation"
    router.assert_idle()


async def test_a_prompt_of_ten_thousand_messages(make_router: MakeRouter) -> None:
    router = make_router()
    answer = await router.post(PATH, {"messages": [{"role": "user", "content": "x"}] * 10_000})
    assert answer.status_code == 422 and "tokens" in answer.json()["error"]
    router.assert_idle()


async def test_variables_of_the_template(make_router: MakeRouter) -> None:
    template = "{{ enable_thinking }}{{ reasoning_effort }}{{ self }}{{ messages[0].content }}"
    router = make_router(templates={"default": template.replace("{{ self }}", "")})
    await router.post(PATH, body(tools=None, chat_template_kwargs={"enable_thinking": False, "self": 1}))
    assert router.scheduler.last.inputs == "FalseHello"
    await router.post(PATH, body(tools=None, reasoning_effort="low"))
    assert router.scheduler.last.inputs == "lowHello"


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
    statuses: dict[int, int] = {}
    for _ in range(150):
        asked = whole
        for _ in range(source.randint(1, 3)):
            asked = mutated(source, asked)
        path = source.choice([PATH, PATH, "/invocations", "/chat_tokenize"])
        if isinstance(asked, dict) and source.random() < 0.3:
            asked = asked | {"stream": True}
        answer = await router.post(path, asked)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 422), (path, asked, answer.text)
        router.assert_idle()
    assert min(statuses[200], statuses[422]) > 10, "the bodies reach every layer"
