"""Reasoning and tool calls in the model's own format over `/v1/chat/completions`: JSON answers, streams, grammars."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, data_of, is_invalid, message_of, says
from tool_chats import CALL, NO_TOOL, PATH, TOOL, body, deltas, script

from router.answers.formats.choice import ModelFormat
from router.answers.formats.markers import Markers
from router.answers.formats.reasoning import named as style_named
from router.answers.formats.table import FORMATS

MakeRouter = Callable[..., Router]

THINKING = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:<think>\n"
ANSWER = [
    "Let", " me.", "\n</think>\n", "\nOne", " moment.", "\n<tool_", "call>\n", '{"name": "get_', 'weather", "argu',
    'ments": {"ci', 'ty": "Par', 'is", "n": 3}', "}\n</tool_call>\n<tool_call>\n",
    '{"name": "get_time", "arguments": {}}', "\n</tool_call>", "<|im_end|>",
]  # fmt: skip
FIRST, SECOND = '{"city": "Paris", "n": 3}', "{}"


def model_format(name: str = "hermes", style: str | None = "think") -> ModelFormat:
    return ModelFormat(format=FORMATS[name], style=style_named(style) if style else None, markers=Markers((), {}))


@pytest.fixture
def make_native(make_router: MakeRouter) -> MakeRouter:
    def make(*answers: list[str], **options: Any) -> Router:
        options = {"templates": {"default": THINKING}, "model_format": model_format()} | options
        return make_router(script(*answers), **options)

    return make


async def test_reasoning_text_and_calls_in_one_answer(make_native: MakeRouter) -> None:
    router = make_native(ANSWER)
    answer = (await router.post(PATH, body())).json()
    message = answer["choices"][0]["message"]
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids) and len(set(ids)) == 2
    assert message == {
        "role": "assistant",
        "content": "One moment.",
        "refusal": None,
        "reasoning": "Let me.",
        "reasoning_content": "Let me.",
        "tool_calls": [
            {"type": "function", "function": {"description": None, "name": name, "arguments": arguments}}
            for name, arguments in (("get_weather", FIRST), ("get_time", SECOND))
        ],
    }
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] == len(ANSWER)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    (request,) = router.scheduler.submitted
    assert request.sampling.grammar_kind == "lark"
    router.assert_idle()


async def test_a_stream_says_the_same(make_native: MakeRouter) -> None:
    router = make_native(ANSWER)
    asked = body(stream=True, stream_options={"include_usage": True}, logprobs=True)
    events = data_of((await router.post(PATH, asked)).content)
    told = deltas(events)
    assert (
        told[0]["role"] == "assistant" and told[0]["content"] is None and not any("role" in each for each in told[1:])
    )
    assert "".join(each.get("reasoning", "") for each in told) == "Let me."
    assert all(each.get("reasoning") == each.get("reasoning_content") for each in told)
    assert "".join(each.get("content") or "" for each in told) == "One moment."
    calls = [call for each in told for call in each.get("tool_calls", ())]
    starts = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]) for call in starts] == [
        (0, {"name": "get_weather", "arguments": ""}), (1, {"name": "get_time", "arguments": ""}),
    ]  # fmt: skip
    for index, arguments in enumerate((FIRST, SECOND)):
        assert "".join(call["function"]["arguments"] for call in calls if call["index"] == index) == arguments
    *chunks, usage = [event for event in events if event != "[DONE]"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    logprobs = [one["token"] for chunk in chunks for one in chunk["choices"][0]["logprobs"]["content"]]
    assert logprobs == ANSWER
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_one_call_where_several_are_not_wanted(make_native: MakeRouter) -> None:
    router = make_native(ANSWER)
    message = (await router.post(PATH, body(parallel_tool_calls=False))).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


async def test_without_tools_only_reasoning_is_read(make_native: MakeRouter) -> None:
    text = ["Hm.", "</think>", "<tool_call>", '{"name": "f"}', "</s>"]
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        router = make_native(text)
        answer = (await router.post(PATH, body(**fields))).json()["choices"][0]
        assert answer["message"]["content"] == '<tool_call>{"name": "f"}'
        assert (answer["message"]["reasoning"], answer["finish_reason"]) == ("Hm.", "stop")


async def test_an_answer_that_ends_in_reasoning_has_no_content(make_native: MakeRouter) -> None:
    router = make_native()
    router.scheduler.script = lambda request: says("Let", " me", reason="length")
    answer = (await router.post(PATH, body())).json()
    assert answer["choices"][0]["message"] == {
        "role": "assistant", "content": None, "refusal": None, "reasoning": "Let me", "reasoning_content": "Let me",
    }  # fmt: skip
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_an_answer_under_a_grammar_is_text(make_native: MakeRouter) -> None:
    router = make_native(["</think>", '{"a"', ": 1}", "</s>"])
    asked = {"messages": [{"role": "user", "content": "Hello"}], "response_format": {"type": "json_object"}}
    answer = (await router.post(PATH, asked)).json()
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'


async def test_a_stop_text_counts_behind_the_reasoning_and_is_left_out(make_native: MakeRouter) -> None:
    """The router looks for it, and ends the generation as one that has succeeded."""
    for stream in (False, True):
        router = make_native()
        router.scheduler.script = lambda request: says(
            "Let STOP", " me", "</think>", "So", " ST", "OP it", " is", " over", reason="length"
        )
        answer = await router.post(PATH, body(stop=["STOP"], stream=stream))
        if stream:
            events = deltas(data_of(answer.content))
            texts = ["".join(each.get(name) or "" for each in events) for name in ("reasoning", "content")]
        else:
            choice = answer.json()["choices"][0]
            texts = [choice["message"][name] for name in ("reasoning", "content")]
            assert choice["finish_reason"] == "stop" and answer.json()["usage"]["completion_tokens"] == 6
        assert texts == ["Let STOP me", "So "]
        assert router.scheduler.last.answer == "marked"
        router.assert_idle()
        assert "tgi_request_success 1" in router.metrics.render().decode()


async def test_a_stop_text_in_the_last_allowed_token(make_native: MakeRouter) -> None:
    router = make_native()
    router.scheduler.script = lambda request: says("Let", "</think>", "So", " ST", "OP", reason="length")
    choice = (await router.post(PATH, body(stop=["STOP"]))).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So ", "stop")
    events = data_of((await router.post(PATH, body(stop=["STOP"], stream=True))).content)
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_ids_have_the_form_that_the_template_wants(make_native: MakeRouter) -> None:
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>get_weather<|tool_call_argument_begin|>{}<|tool_call_end|>"
    earlier = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
    asked = body()
    asked["messages"] = [*asked["messages"], earlier, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    for name, text, form in (
        ("kimi_k2", kimi, r"functions\.get_weather:1"),
        ("mistral_args", "[TOOL_CALLS]get_weather[ARGS]{}", "[0-9a-f]{9}"),
    ):
        router = make_native([text, "</s>"], model_format=model_format(name, None))
        message = (await router.post(PATH, asked)).json()["choices"][0]["message"]
        assert re.fullmatch(form, message["tool_calls"][0]["id"])
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {}


async def test_no_thinking_is_asked_of_the_template(make_native: MakeRouter) -> None:
    template = "{{ enable_thinking }} {{ thinking }} {{ messages[0].content }}"
    router = make_native(["Yes", "</s>"], templates={"default": template})
    await router.post(PATH, body(tools=None, reasoning_effort="none"))
    assert router.scheduler.last.inputs == "False False Hello"


TOKENS = {"<tool_call>": 7, "</tool_call>": 8, "<think>": 9, "</think>": 10}
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def with_tokens() -> ModelFormat:
    """The markers are tokens, but none of the scripts here writes them as such."""
    return dataclasses.replace(model_format(), markers=Markers(TOKENS, TOKENS))


def frame_of(router: Router) -> str:
    sampling = router.scheduler.last.sampling
    assert sampling.grammar_kind == "lark"
    frame: str = json.loads(sampling.grammar)["grammars"][0]["lark_grammar"]
    return frame


@pytest.mark.parametrize(("choice", "names"), [("required", ["get_weather", "get_time"]), ("get_time", ["get_time"])])
async def test_a_demanded_call_is_forced_into_the_models_format(
    make_native: MakeRouter, choice: str, names: list[str]
) -> None:
    router = make_native(ANSWER, model_format=with_tokens())
    answer = await router.post(PATH, body(tool_choice=choice))
    assert answer.status_code == 200, answer.text
    frame = frame_of(router)
    assert frame.startswith("start: inside calls ")
    assert [name for name in ("get_weather", "get_time") if name in frame] == names
    assert len(json.loads(router.scheduler.last.sampling.grammar)["grammars"]) == 1 + len(names)


async def test_free_calls_are_held_to_their_schemas(make_native: MakeRouter) -> None:
    router = make_native(ANSWER, ANSWER, model_format=with_tokens())
    await router.post(PATH, body())
    assert frame_of(router).startswith("start: any* (calls any*)*\nany: <[^7]>\n") and " call)*" in frame_of(router)
    await router.post(PATH, body(parallel_tool_calls=False))
    assert " call)*" not in frame_of(router)


async def test_calls_whose_opener_is_no_token_are_held_behind_its_text(make_native: MakeRouter) -> None:
    router = make_native(ANSWER)
    message = (await router.post(PATH, body())).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 2
    trigger = json.loads(router.scheduler.last.sampling.grammar)["trigger"]
    first, second = (f'<tool_call>\n{{"name": "{name}", "arguments":' for name in ("get_weather", "get_time"))
    assert trigger == {"texts": [first, second]}


async def test_tools_that_cannot_be_called_leave_a_form_alone(make_native: MakeRouter) -> None:
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        router = make_native("{}")
        answer = await router.post(PATH, body(**{"response_format": {"type": "json_object"}, **fields}))
        assert answer.status_code == 200, answer.text
        assert router.scheduler.last.sampling.grammar_kind != "none"


async def test_a_schema_that_cannot_be_enforced(make_native: MakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    """It becomes any object, and the schemas of other functions are enforced; `strict` is refused."""
    wrong = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wrong}}
    strict = {"type": "function", "function": {"name": "f", "parameters": wrong, "strict": True}}
    held = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    caplog.set_level("INFO", logger="router.grammar.checker")
    for choice in ("auto", "required"):
        router = make_native(ANSWER, model_format=with_tokens())
        answer = await router.post(PATH, body(tools=[held, tool], tool_choice=choice))
        assert answer.status_code == 200, answer.text
        _, first, second = json.loads(router.scheduler.last.sampling.grammar)["grammars"]
        assert "city" in first["json_schema"]["properties"]
        assert second["json_schema"]["type"] == "object" and "properties" not in second["json_schema"]
        assert "instead of their schema's" in caplog.text and "uniqueItems" in caplog.text
        caplog.clear()
        refused = await router.post(PATH, body(tools=[held, strict], tool_choice=choice))
        assert is_invalid(refused) and "uniqueItems" in message_of(refused)


async def test_parameters_that_are_no_object_are_refused(make_native: MakeRouter) -> None:
    for parameters in ("x", [], {"type": "string"}, {"type": ["string", "null"]}, {"type": 1}):
        router = make_native(ANSWER, model_format=with_tokens())
        wrong = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        for choice in ("auto", "required"):
            answer = await router.post(PATH, body(tools=[wrong], tool_choice=choice))
            assert is_invalid(answer) and "`f` must be a JSON schema of an object" in message_of(answer)


async def test_functions_without_a_description_suit_the_template_of_gpt_oss(make_native: MakeRouter) -> None:
    template = "{% for t in tools %}{{ '// ' + t.function.description }}{% endfor %}{{ messages[0].content }}"
    router = make_native(["Fine", "</s>"], templates={"default": template}, model_format=model_format("harmony", None))
    answer = await router.post(PATH, body())
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.inputs == "// Weather// Hello"


async def test_ids_without_the_name_get_it_where_the_model_looks_for_it(make_native: MakeRouter) -> None:
    """Kimi's template shows a call by its id alone."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.id }}]{% endfor %}{{ m.tool_call_id or '' }};"
        "{% endfor %}"
    )
    router = make_native(["Fine", "</s>"], templates={"default": template}, model_format=model_format("kimi_k2", None))

    def turn(*calls: tuple[str | None, str]) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": one, "function": {"name": name}} for one, name in calls]}

    def result(name: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": name, "content": "x"}

    messages = [
        turn(("call_1", "f"), ("functions.g:1", "g")), result("functions.g:1"), result("call_1"),
        turn(("call_1", "h"), (None, "f")), result("call_1"), result("other"), {"role": "user", "content": "?"},
    ]  # fmt: skip
    await router.post(PATH, {"messages": messages})
    assert router.scheduler.last.inputs == (
        "[functions.f:0][functions.g:1];functions.g:1;functions.f:0;[functions.h:2][functions.f:3];functions.h:2;other;;"
    )


async def test_names_that_the_format_cannot_hold(make_native: MakeRouter) -> None:
    odd = {"type": "function", "function": {"name": "get weather"}}
    router = make_native(CALL, model_format=with_tokens())
    await router.post(PATH, body(tools=[TOOL, odd], tool_choice="required"))
    assert router.scheduler.last.sampling.grammar_kind == "json"


@pytest.mark.parametrize(
    ("template", "kind", "begins"),
    [
        (THINKING, "lark", "start: inside "),
        (PLAIN, "lark", "start: thinking? "),
        (PLAIN + "<think>\n\n</think>\n\n", "json", ""),
    ],
)
async def test_a_form_of_the_answer_begins_behind_the_thinking(
    make_native: MakeRouter, template: str, kind: str, begins: str
) -> None:
    router = make_native(['{"a": 1}', "</s>"], model_format=with_tokens(), templates={"default": template})
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {
        "messages": [{"role": "user", "content": "Hello"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    assert (await router.post(PATH, asked)).status_code == 200
    assert router.scheduler.last.sampling.grammar_kind == kind
    if begins:
        assert frame_of(router).startswith(begins)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_called_and_all_are_shown(make_native: MakeRouter, mode: str) -> None:
    template = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}<think>"
    router = make_native(ANSWER, model_format=with_tokens(), templates={"default": template})
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    answer = await router.post(PATH, body(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.inputs == "[get_weather][get_time]<think>"
    frame = frame_of(router)
    assert "get_time" in frame and "get_weather" not in frame and frame.startswith("start: any*") == (mode == "auto")


@pytest.mark.parametrize(
    ("allowed", "says_so"),
    [
        ({"mode": "none", "tools": [TOOL]}, "must have the `mode`"),
        ({"mode": "auto", "tools": []}, "must have the `mode`"),
        (None, "must have the `mode`"),
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}, "`f`, which is not in `tools`"),
        ({"mode": "auto", "tools": [{"type": "mcp"}]}, "`mcp` is not supported"),
    ],
)
async def test_lists_of_allowed_tools_that_make_no_sense(router: Router, allowed: Any, says_so: str) -> None:
    answer = await router.post(PATH, body(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))
    assert is_invalid(answer) and says_so in message_of(answer)


async def test_a_budget_limits_the_thinking(make_native: MakeRouter) -> None:
    hello = {"messages": [{"role": "user", "content": "Hello"}], "thinking_token_budget": 5}
    form = {"response_format": {"type": "json_object"}}
    for asked, begins in (
        (hello, "start: inside any*\n"), (body(thinking_token_budget=5), "start: inside any* (calls any*)*\n"),
        (body(thinking_token_budget=5, tool_choice="required"), "start: inside calls "),
        (hello | form, "start: inside "),
    ):  # fmt: skip
        router = make_native(["{}", "</s>"], model_format=with_tokens())
        answer = await router.post(PATH, asked)
        assert answer.status_code == 200, answer.text
        assert frame_of(router).startswith(begins) and "thought{0,5} <[10]>" in frame_of(router)
    over = make_native(["{}", "</s>"], model_format=with_tokens(), templates={"default": PLAIN + "</think>"})
    assert (await over.post(PATH, hello)).status_code == 200
    assert over.scheduler.last.sampling.grammar_kind == "none"


async def test_a_budget_that_cannot_be_kept_is_refused(make_native: MakeRouter) -> None:
    hello = {"messages": [{"role": "user", "content": "Hello"}], "thinking_token_budget": 5}
    router = make_native(["Hi", "</s>"])
    answer = await router.post(PATH, hello)
    assert is_invalid(answer) and "a budget of reasoning tokens" in message_of(answer)


FORM = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({}, "start: inside (calls "),
        ({"tool_choice": "required"}, "start: inside calls "),
        ({"tool_choice": "none"}, "start: inside  @answer\n"),
    ],
)
async def test_calls_or_an_answer_of_a_form(make_native: MakeRouter, fields: dict[str, Any], begins: str) -> None:
    router = make_native(["</think>", '{"a": 1}', "</s>"], model_format=with_tokens())
    answer = await router.post(PATH, body(**fields) | FORM)
    assert answer.status_code == 200, answer.text
    assert frame_of(router).startswith(begins)


async def test_where_a_form_cannot_be_told_from_a_call_the_model_first_decides(make_native: MakeRouter) -> None:
    """In TGI's form; then the answer in words has the form that is asked for."""
    router = make_native([], model_format=model_format("llama_json", None))
    router.scheduler.script = script(NO_TOOL, ['{"a": ', "1}", "</s>"])
    choice = (await router.post(PATH, body() | FORM)).json()["choices"][0]
    assert choice["message"]["content"] == '{"a": 1}' and choice["finish_reason"] == "stop"
    first, second = router.scheduler.submitted
    assert "_name" in first.sampling.grammar and first.answer == "call"
    assert second.sampling.grammar_kind == "json" and second.answer == "text"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_continued_within_its_reasoning(make_native: MakeRouter, stream: bool) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    router = make_native([" me.", "</think>", "\n\nYes", "</s>"], templates={"default": template})
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>He asks"}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "stream": stream}
    answer = await router.post(PATH, asked)
    if not stream:
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (" me.", "Yes")
    else:
        found = deltas(data_of(answer.content))
        assert "".join(delta.get("reasoning") or "" for delta in found) == " me."
        assert "".join(delta.get("content") or "" for delta in found) == "Yes"
