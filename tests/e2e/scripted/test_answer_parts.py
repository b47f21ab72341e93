"""Reasoning, text and calls of one answer by every chat API, whole and streamed: stop texts, marks, cut answers."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_trials import APIS, CHAT, MESSAGES, ask
from support.format_outputs import OUTPUTS, SCHEMAS
from support.format_outputs import served as served_rows
from support.format_templates import template_of
from support.format_tokens import TOKENS
from support.scripted_server import ScriptedServer, Served

from router.answers.formats.reasoning import STYLES
from router.answers.formats.table import FORMATS

pytestmark = pytest.mark.e2e

STYLE = pytest.mark.parametrize(
    "style",
    [pytest.param(style, marks=[] if style.name in ("think", "gemma4") else [pytest.mark.weekly]) for style in STYLES],
    ids=lambda style: style.name,
)
ROWS = pytest.mark.parametrize("name", served_rows(name for name, row in FORMATS.items() if row.turn is None))
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Does it", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
HARMONY = "<|channel|>analysis<|message|>one STOP two<|end|><|start|>assistant<|channel|>final<|message|>Hello. STOP x"


def thinking(scripted: ScriptedServer, style: str = "think", name: str = "hermes") -> Served:
    return scripted.at(template_of(name), reasoning_parser=style)


@STYLE
def test_stop_texts_count_behind_the_reasoning(scripted: ScriptedServer, style: Any) -> None:
    at = thinking(scripted, style.name)
    message = scripted.says(f"{style.opens}one STOP two{style.closes}\n\nHello. STOP more", ends=False)
    for stop, content in ((["STOP"], "Hello. "), (["\n\n", " more"], "Hello. STOP"), (["two"], "Hello. STOP more")):
        answer = ask(at, message, apis=(CHAT, MESSAGES), stop=stop, max_tokens=70)
        assert answer.content.startswith(content) and answer.reasoning == "one STOP two"
        if stop != ["two"]:
            assert answer.content == content and answer.finish == "stop"


def test_stop_texts_count_in_the_final_channel(scripted: ScriptedServer) -> None:
    """And not in the words of headers."""
    at = scripted.at(template_of("harmony"))
    answer = ask(at, scripted.says(HARMONY), apis=(CHAT, MESSAGES), stop=["STOP", "final", "analysis"])
    assert (answer.reasoning, answer.content, answer.finish) == ("one STOP two", "Hello. ", "stop")
    whole = at.post(CHAT, {"messages": [{"role": "user", "content": scripted.says(HARMONY)}], "stop": "STOP"} | COLD)
    ids = scripted.model.ids(HARMONY.partition("Hello. STOP")[0] + "Hello. STOP")
    assert whole.json()["usage"]["completion_tokens"] == len(ids)


COLD = {"temperature": 0, "max_tokens": 200}


@ROWS
def test_stop_texts_in_text_and_arguments(scripted: ScriptedServer, name: str) -> None:
    at = scripted.at(template_of(name), reasoning_parser="think")
    call = next(one for one in OUTPUTS[name] if len(one.calls) == 1 and one.is_usual)
    thought = "<think>\nOslo STOP\n</think>\n\n" if not FORMATS[name].starts else ""
    for text, stop, content, num_calls in (
        (f"{thought}Well STOP it.{call.text}", "STOP", "Well ", 0),
        (f"{thought}{call.text}", "Zür", "", 1),
        (f"{thought}{call.text}", "ich", "", 1),
    ):
        answer = ask(at, scripted.says(text), tools=TOOLS, stop=[stop])
        assert (answer.content, len(answer.calls), answer.finish) == (content, num_calls, "stop")
        assert answer.reasoning == ("Oslo STOP" if thought else "")
        assert all(arguments == '{"city": "' + "Zürich"[: "Zürich".index(stop)] for _, arguments in answer.calls)
    kept = ask(at, scripted.says("Well STOP it."), stop=["STOP"], include_stop_str_in_output=True)
    assert kept.content == "Well STOP"


def test_what_stands_alone_is_text(scripted: ScriptedServer) -> None:
    """An end of reasoning where none is, and the marks of a format in letters."""
    at = thinking(scripted)
    letters = scripted.model.letters
    for answer, reasoning, content in (
        (("</think>",), "", "</think>"),
        (("Use </think> so.",), "", "Use </think> so."),
        (("<think>Hm.</think>Use </think> and <think> so.",), "Hm.", "Use </think> and <think> so."),
        ((letters("<think>Hm.</think> yes"),), "", "<think>Hm.</think> yes"),
        (("<think><think>Hm.</think>\n\nYes.",), "Hm.", "Yes."),
        (("a</tool_call>b",), "", "a</tool_call>b"),
        ((letters("<tool_call>\n{}\n</tool_call>"),), "", "<tool_call>\n{}\n</tool_call>"),
        ((scripted.model.single_bytes("é🙂</think>日"),), "", "é🙂</think>日"),
    ):
        found = ask(at, scripted.says(*answer), apis=APIS, tools=TOOLS)
        assert (found.reasoning, found.content, found.calls) == (reasoning, content, [])


@ROWS
def test_text_around_a_call_stays_apart(scripted: ScriptedServer, name: str) -> None:
    if FORMATS[name].starts:
        return  # calls are at the beginning of an answer
    at = scripted.at(template_of(name), reasoning_parser="think")
    call = next(one for one in OUTPUTS[name] if len(one.calls) == 1 and one.is_usual)
    message = scripted.says(f"<think>\nHm.\n</think>\n\nLook.{call.text.strip()}Done. \n")
    found = ask(at, message, apis=APIS, tools=TOOLS)
    assert (found.reasoning, found.content, found.arguments) == ("Hm.", "Look.\nDone. \n", call.calls)


@ROWS
def test_an_answer_that_is_cut_keeps_what_has_come(scripted: ScriptedServer, name: str) -> None:
    """At every place: whole and streamed agree, and what has come is the beginning of what would have come."""
    at = scripted.at(template_of(name), reasoning_parser="think")
    call = next(one for one in OUTPUTS[name] if len(one.calls) == 1 and one.is_usual)
    text = call.text if FORMATS[name].starts else f"<think>Hm.</think>Look.\n{call.text}"
    message, num_tokens = scripted.says(text), len(scripted.model.ids(text))
    shown = text.replace("<think>Hm.</think>", "")
    for token, is_special in TOKENS.items():
        shown = shown.replace(token, "") if is_special else shown
    for most in range(1, num_tokens, max(1, num_tokens // 6)):
        found = ask(at, message, tools=TOOLS, max_tokens=most)
        assert found.finish == "length" and "Hm.".startswith(found.reasoning)
        # A call that breaks off before its name is complete is text.
        assert (shown if not found.calls else "Look.").startswith(found.content)
        assert len(found.calls) <= 1
