"""Calls that models write a little differently than their templates show them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.format_outputs import PARAMETERS

from router.answers.formats.events import Arguments, CallEnded, CallStarted, Content, Reasoning
from router.answers.formats.markers import Markers
from router.answers.formats.reader import AnswerReader
from router.answers.formats.reasoning import named as style_named
from router.answers.formats.schema_types import ArgumentTypes
from router.answers.formats.table import FORMATS, named

MIXED = {
    "type": "object",
    "properties": {
        "flag": {"type": "boolean"},
        "none": {"type": ["string", "null"]},
        "deep": {"type": "object"},
        "n": {"type": "integer"},
        "text": {"type": "string"},
    },
}
TOOLS: dict[str, Any] = {"get_weather": PARAMETERS, "f": MIXED}


def read(name: str, text: str, size: int, tools: dict[str, Any], style: str | None) -> tuple[str, str, list[Any]]:
    """Content, reasoning, and the calls that are complete."""
    reader = AnswerReader(
        FORMATS[name], style_named(style) if style else None, Markers((), {}), types=ArgumentTypes(tools)
    )
    events = [event for start in range(0, len(text), size) for event in reader.read(text[start : start + size])]
    content = reasoning = arguments = ""
    called, calls = "", []
    for event in events + reader.end():
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallStarted):
            called, arguments = event.name, ""
        elif isinstance(event, Arguments):
            arguments += event.text
        elif isinstance(event, CallEnded) and event.is_complete:
            calls.append((called, json.loads(arguments)))
    return content, reasoning, calls


TYPED = {"flag": True, "none": None, "deep": {"k": "v"}, "n": 3, "text": "True"}
QWEN = "".join(
    f"<parameter={key}>\n{value}\n</parameter>\n"
    for key, value in {"flag": "True", "none": "None", "deep": "{'k': 'v'}", "n": "3", "text": "True"}.items()
)
GLM = "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    for key, value in {"flag": "True", "none": "None", "deep": "{'k': 'v'}", "n": "3", "text": "True"}.items()
)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("gemma4", '<|tool_call>call:f{text:<|"|>a<|"|>}<turn|>', [("f", {"text": "a"})]),
        ("gemma4", "<|tool_call>call:f{n:108.}<tool_call|>", [("f", {"n": 108})]),
        ("gemma4", "<|tool_call>call:f{n:1}", [("f", {"n": 1})]),
        ("gemma4", "<|tool_call>call:f{n:1", []),
        ("qwen_xml", f"<tool_call>\n<function=f>\n{QWEN}</function>\n</tool_call>", [("f", TYPED)]),
        ("glm", f"<tool_call>f\n{GLM}</tool_call>", [("f", TYPED)]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"text\\": \\"a\\\\nb\\"}"}</tool_call>',
            [("f", {"text": "a\nb"})],
        ),
        ("hermes", '<tool_call>{"arguments": "{\\"n\\": 1}", "name": "f"}</tool_call>', [("f", {"n": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>', [("f", "no object")]),
        (
            "llama_json",
            '{"name": "f", "parameters": {"n": 1}}\n{"name": "f", "parameters": {"n": 2}}',
            [("f", {"n": 1}), ("f", {"n": 2})],
        ),
        ("pythonic", "[f(n=1)]\n[f(n=2)]", [("f", {"n": 1}), ("f", {"n": 2})]),
        ("pythonic", "<|python_start|>[f(n=07, text='a\nb')]<|python_end|>", [("f", {"n": 7, "text": "a\nb"})]),
        ("pythonic", "[f(n=-007)]", [("f", {"n": -7})]),
    ],
)
def test_what_is_meant(name: str, text: str, calls: list[Any], size: int) -> None:
    content, reasoning, found = read(name, text, size, TOOLS, None)
    assert (content.replace("<turn|>", ""), reasoning, found) == ("", "", calls)


SOLAR = "<|tool_call:start|>f\n<|tool_arg:start|>"
DSML = '<｜DSML｜invoke name="f"><｜DSML｜parameter '
INNER = "<function=f>\n<parameter=other>\n1\n</parameter>\nB"


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        # The mark behind a value is missing, and another argument or the end of the call follows.
        ("a\n<parameter=n>\n1\n</parameter>", {"text": "a", "n": 1}),
        ("a", {"text": "a"}),
        # The mark is in the text, or the mark of something that is no other argument of the function.
        ("a</parameter>b\n</parameter>", {"text": "a</parameter>b"}),
        ("a\n</parameter>\nb\n</parameter>\n", {"text": "a\n</parameter>\nb"}),
        (f"A\n{INNER}\n</parameter>", {"text": f"A\n{INNER}"}),
        ("a</function>b\n</parameter>", {"text": "a</function>b"}),
        ("a\n<parameter=text>\nb\n</parameter>", {"text": "a\n<parameter=text>\nb"}),
        ("a\n</parameter>\n<parameter=flag>\nTrue", {"text": "a", "flag": True}),
    ],
)
def test_a_value_ends_where_the_format_goes_on(value: str, arguments: Any, size: int) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=text>\n{value}\n</function>\n</tool_call>"
    assert read("qwen_xml", text, size, TOOLS, None) == ("", "", [("f", arguments)])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="text">{}</parameter></invoke>'),
        ("glm", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        ("solar_open2", f"{SOLAR}text<|tool_arg:value|>{{}}<|tool_arg:end|>\n<|tool_call:end|>"),
        ("deepseek_dsml", f'{DSML}name="text" string="true">{{}}</｜DSML｜parameter></｜DSML｜invoke>'),
        ("minicpm5", '<function name="f"><param name="text">{}</param></function>'),
        ("hy_v3", "<tool_calls><tool_call>f<tool_sep><arg_key>text</arg_key><arg_value>{}</arg_value></tool_call>"),
    ],
)  # fmt: skip
def test_the_mark_behind_a_value_may_be_in_it(name: str, text: str, size: int) -> None:
    form = FORMATS[name].form
    assert form is not None and form.arguments is not None
    value = f"a{form.arguments.behind_value.strip(chr(10) + chr(0xE002))} b"
    assert read(name, text.format(value), size, TOOLS, None)[2] == [("f", {"text": value})]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_call_right_behind_a_thought(size: int) -> None:
    text = "<|channel>thought\nHm.<channel|><|tool_call>call:f{n:1}<tool_call|>"
    assert read("gemma4", text, size, TOOLS, "gemma4") == ("", "Hm.", [("f", {"n": 1})])


@pytest.mark.parametrize("size", [1, 1000])
def test_an_id_that_is_only_a_number_calls_the_only_tool(size: int) -> None:
    begin, arguments = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_argument_begin|>"
    text = begin + "0" + arguments + '{"n": 1}<|tool_call_end|><|tool_calls_section_end|>'
    assert read("kimi_k2", text, size, {"f": MIXED}, None)[2] == [("f", {"n": 1})]
    assert read("kimi_k2", text, size, TOOLS, None)[2] == [("0", {"n": 1})]


def test_text_is_no_literal() -> None:
    """Where an argument may be a text, or may be anything, only null is understood."""
    types = ArgumentTypes(TOOLS)
    anything = types.of("unknown", "x")
    assert types.json_of("True", anything) == '"True"' and types.json_of("None", anything) == '"None"'
    assert types.json_of("(1, 2)", frozenset({"integer"})) == '"(1, 2)"'


def test_of_formats_with_one_alias_the_template_decides() -> None:
    for template, name in (("[TOOL_CALLS]f[ARGS]", "mistral_args"), ("[TOOL_CALLS][", "mistral_json")):
        found = named("mistral", template)
        assert found is not None and found.name == name
    assert named("mistral") is FORMATS["mistral_json"] and named("unknown") is None
