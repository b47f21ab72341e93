"""Grammars of arguments that are no JSON object: what they take and refuse, and what they cannot hold."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from call_trials import matcher_of, tokenizer_of

from router.answers.formats.events import Arguments
from router.answers.formats.grammar import Thinking, forced_calls, has_rules
from router.answers.formats.markers import Markers
from router.answers.formats.reader import AnswerReader
from router.answers.formats.schema_types import ArgumentTypes, without_unknown_types
from router.answers.formats.table import FORMATS
from router.api.chat.schema import FunctionDefinition
from router.api.chat.tools import OfferedTools

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string", "minLength": 1, "maxLength": 40},
    "maybe": {"type": ["string", "null"]},
    "kind": {"enum": ["a", "b c"]},
    "mixed": {"enum": ["a", 5]},
    "n": {"$ref": "#/$defs/n"},
    "many": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["text"],
    "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
}
QWEN = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
Q = '<|"|>'
GEMMA = "<|tool_call>call:f{{{}}}<tool_call|>"


def tagged(**values: str) -> str:
    return QWEN.format("".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()))


def takes(name: str, text: str, schema: Any = SCHEMA) -> bool:
    tokenizer, _, markers = tokenizer_of(name)
    matcher = matcher_of(name, forced_calls(FORMATS[name], markers, {"f": schema}, Thinking(), is_one=True))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def read(name: str, text: str, schema: Any = SCHEMA) -> Any:
    reader = AnswerReader(FORMATS[name], None, Markers((), {}), types=ArgumentTypes({"f": schema}))
    whole = reader.read(text) + reader.end()
    return json.loads("".join(event.text for event in whole if isinstance(event, Arguments)))


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen_xml", tagged(text='<b> "x"\n{'), {"text": '<b> "x"\n{'}),
        ("qwen_xml", tagged(text="5", maybe="null", kind="b c"), {"text": "5", "maybe": None, "kind": "b c"}),
        (
            "qwen_xml",
            tagged(text="a", maybe="[1", mixed='"a"', n="7"),
            {"text": "a", "maybe": "[1", "mixed": "a", "n": 7},
        ),
        (
            "qwen_xml",
            tagged(text="a", mixed="5", many='["</parameter>", "x"]'),
            {"text": "a", "mixed": 5, "many": ["</parameter>", "x"]},
        ),
        (
            "glm",
            "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value> a\n</arg_value>\n<arg_key>n</arg_key><arg_value>3"
            "</arg_value></tool_call>",
            {"text": " a\n", "n": 3},
        ),
        ("glm", "<tool_call>f<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>", {"text": "x"}),
        (
            "pythonic",
            '[f(text="é\\n", mixed=5, many=["a)", "b"])]',
            {"text": "é\n", "mixed": 5, "many": ["a)", "b"]},
        ),
        (
            "gemma4",
            GEMMA.format(f"text:{Q}a, b}}{Q},maybe:null,many:[{Q}]{Q}]"),
            {"text": "a, b}", "maybe": None, "many": ["]"]},
        ),
    ],
)
def test_what_fits_is_taken_and_read(name: str, text: str, arguments: dict[str, Any]) -> None:
    assert takes(name, text)
    assert read(name, text) == arguments


def test_a_type_that_does_not_exist_leaves_the_other_arguments_their_grammar() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "float"}, "kind": {"enum": ["a", "b"]}}}
    known = without_unknown_types(schema)
    assert takes("qwen_xml", tagged(x="1.5", kind="a"), known) and not takes("qwen_xml", tagged(kind="c"), known)
    assert read("qwen_xml", tagged(x="1.5", kind="a"), schema) == {"x": 1.5, "kind": "a"}
    for same in (None, True, {"type": "object"}, {"properties": {"x": {"type": "number"}, "y": True}}):
        assert without_unknown_types(same) is same
    functions = tuple(
        FunctionDefinition(name=str(strict), parameters=schema, strict=strict) for strict in (False, True)
    )
    assert list(OfferedTools(functions, or_none=True).enforced.values()) == [known, schema]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen_xml", tagged()),
        ("qwen_xml", tagged(maybe="x")),
        ("qwen_xml", tagged(text="")),
        ("qwen_xml", tagged(text="x" * 41)),
        ("qwen_xml", tagged(text="x", kind="c")),
        ("qwen_xml", tagged(text="x", n="0")),
        ("qwen_xml", tagged(text="x", n='"1"')),
        ("qwen_xml", tagged(kind="a", text="x")),
        ("qwen_xml", tagged(text="x", other="x")),
        ("qwen_xml", tagged(text="x", many='["a", "b", "c"]')),
        ("pythonic", "[f()]"),
        ("pythonic", '[f(text="x", )]'),
        ("pythonic", '[f(text="x"n=3)]'),
        ("gemma4", GEMMA.format("text:x")),
        ("gemma4", GEMMA.format(f"text:{Q}x{Q},many:[a]")),
        ("gemma4", GEMMA.format(f"text:{Q}x{Q},n:12")),
    ],
)
def test_what_does_not_fit_is_refused(name: str, text: str) -> None:
    assert not takes(name, text)


@pytest.mark.parametrize("name", ["qwen_xml", "glm", "pythonic", "gemma4", "functiongemma"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]},
        {"type": "object", "properties": {"a b": {"type": "integer"}}},
        {"anyOf": [{"type": "object", "properties": {}}]},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x"}}},
    ],
)
def test_schemas_that_these_rules_cannot_hold(name: str, schema: dict[str, Any]) -> None:
    has_json_texts = name == "pythonic" and "pattern" in json.dumps(schema)
    assert has_rules(FORMATS[name], tokenizer_of(name)[2], {"f": schema}) == has_json_texts


KIND_A = {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"], "additionalProperties": False}
KIND_B = {"type": "object", "properties": {"k": {"const": "b"}, "n": {"type": "integer"}}, "required": ["k"],
          "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "schema", "taken", "refused"),
    [
        # A type beside branches, and values that are listed, bind together.
        ("pythonic", {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": -5}]}, ["7", "-5"], ["'a'", "3", "[]"]),
        ("pythonic", {"type": "string", "enum": ["a", 1, None]}, ["'a'"], ["1", "None"]),
        ("pythonic", {"const": "ab", "maxLength": 2, "enum": ["ab", "c"]}, ["'ab'"], ["'c'"]),
        ("pythonic", {"enum": ["ab", "c"], "minLength": 2}, ["'ab'"], ["'c'"]),
        ("gemma4", {"type": "integer", "enum": ["a", 1]}, ["1"], [f"{Q}a{Q}"]),
        ("gemma4", {"type": ["string", "null"], "enum": ["a", 1, None]}, [f"{Q}a{Q}", "null"], ["1"]),
        ("glm", {"enum": ["ab", "c"], "type": "string", "maxLength": 1}, ["c"], ["ab"]),
        # Of overlapping branches none is chosen.
        ("pythonic", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", "'a'"], ["None"]),
        ("pythonic", {"oneOf": [KIND_A, KIND_B]}, ["{'k': 'a'}", "{'k': 'b', 'n': 1}"], ["{'k': 'c'}", "{}"]),
        ("gemma4", {"oneOf": [KIND_A, KIND_B]}, [f"{{k:{Q}a{Q}}}", f"{{k:{Q}b{Q},n:1}}"], [f"{{k:{Q}a{Q},n:1}}"]),
        # What has no type binds what it is about.
        ("qwen_xml", {"items": {"type": "integer"}}, ["[1]", '"a"', "true"], ['["a"]', "a"]),
        ("pythonic", {"minimum": 5}, ["5", '"a"', "[1]"], ["4"]),
    ],
)
def test_all_that_a_schema_says_binds(name: str, schema: Any, taken: list[str], refused: list[str]) -> None:
    text = {
        "pythonic": "[f(v={})]",
        "gemma4": "<|tool_call>call:f{{v:{}}}<tool_call|>",
        "glm": "<tool_call>f<arg_key>v</arg_key><arg_value>{}</arg_value></tool_call>",
        "qwen_xml": QWEN.format("<parameter=v>\n{}\n</parameter>\n"),
    }[name]
    whole = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    assert [one for one in (*taken, *refused) if takes(name, text.format(one), whole)] == taken


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "string"}, {"enum": ["a"]}],
        [KIND_A, {"type": "object", "properties": {"n": {"type": "integer"}}}],
        [KIND_A, KIND_A],
        [{"type": "object", "properties": {"n": {"const": number}}, "required": ["n"]} for number in (1, 1.0)],
    ],
)
def test_branches_of_one_of_that_overlap_are_no_rules(name: str, branches: list[Any]) -> None:
    schema = {"type": "object", "properties": {"v": {"oneOf": branches}}}
    assert not has_rules(FORMATS[name], tokenizer_of(name)[2], {"f": schema})
    assert has_rules(
        FORMATS[name], tokenizer_of(name)[2], {"f": json.loads(json.dumps(schema).replace("oneOf", "anyOf"))}
    )


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"required": ["a"]},
        {"minProperties": 1},
        {"anyOf": [{"required": ["a"]}]},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/x", "$defs": {"x": {}}},
    ],
)
def test_arguments_are_an_object_whatever_their_schema_leaves_open(schema: dict[str, Any]) -> None:
    call = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
    values = ['{"a": 1}', "3", '"a"', "[]", "null"]
    assert [one for one in values if takes("hermes", call.format(one), schema)] == ['{"a": 1}']


def test_names_that_python_cannot_have() -> None:
    markers = tokenizer_of("pythonic")[2]
    for name, is_possible in (("a.b_c", True), ("a-b", False), ("a.call", False)):
        assert has_rules(FORMATS["pythonic"], markers, {name: SCHEMA}) == is_possible


_WRONG: list[Any] = [
    None,
    True,
    -1,
    1.5,
    10**12,
    '0,1}/ "TEXT" /x{0',
    "string",
    [],
    [{}],
    [[]],
    {},
    {"a": [{}]},
    [None, 1],
]
_KEYWORDS = ("type", "required", "properties", "enum", "const", "anyOf", "oneOf", "minLength", "maxLength", "items",
             "minItems", "maxItems", "additionalProperties", "$ref", "$defs", "title", "default")  # fmt: skip


_WITH_RULES = ("qwen_xml", "glm", "pythonic", "gemma4", "functiongemma", "hermes")
"""Of each way to write arguments one."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _WITH_RULES else pytest.mark.long)
        for name, one in sorted(FORMATS.items())
        if one.form is not None
    ],
)
def test_no_keyword_of_a_wrong_type_is_an_error_of_ours_or_reaches_a_grammar(name: str) -> None:
    """As a keyword of the arguments, of one of them, and of a part of one."""
    format_, (_, _, markers) = FORMATS[name], tokenizer_of(name)
    base: list[Any] = [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]
    num_served = 0
    for keyword, wrong, one in itertools.product(_KEYWORDS, _WRONG, base):
        member = {**one, keyword: wrong}
        for schema in (
            {"type": "object", "properties": {"a": member}},
            {"type": "object", "properties": {"a": {"type": "array", "items": member}}},
            {"type": "object", "properties": {"a": {"anyOf": [member, {"type": "null"}]}}, "required": ["a"]},
            {"type": "object", "properties": {"a": one}, keyword: wrong},
        ):
            if has_rules(format_, markers, {"f": schema}):
                grammar = forced_calls(format_, markers, {"f": schema}, Thinking(), is_one=True)
                num_served += 1
                frame = json.loads(grammar)["grammars"][0]["lark_grammar"]
                assert '/ "TEXT" /' not in frame, (schema, frame)
    assert num_served
