"""The grammar of tool calls: what a model may write and what not, asked of the compiled automaton."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from router.answers.tgi_form.tool_schema import call_schema, call_schema_in_words
from router.errors import ToolError
from router.grammar.checker import AskedGrammar
from router.grammar.worker import _Bytes, check
from wire.grammar import compile_grammar

_BYTES = LLTokenizer(TokenizerWrapper(_Bytes()))


def accepted(functions: list[tuple[str, Any]], calls: list[Any], *, or_none: bool = False) -> list[bool]:
    """Whether each call, an object or a text, is one that the model may write."""
    outcome = check("json", json.dumps(call_schema(functions, or_none=or_none)), _BYTES)
    assert "fault" not in outcome, outcome
    answers = []
    for call in calls:
        data = (call if isinstance(call, str) else json.dumps({"function": call})).encode()
        matcher = compile_grammar("json", outcome["grammar"], _BYTES, ())
        answers.append(matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting())
    return answers


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city"],
}


def test_one_function_with_its_arguments_in_order() -> None:
    right = [{"_name": "w", "city": "x"}, {"_name": "w", "city": "x", "unit": "celsius"}]
    wrong = [
        {"_name": "w"},
        {"_name": "v", "city": "x"},
        {"city": "x", "_name": "w"},
        {"_name": "w", "unit": "celsius", "city": "x"},
        {"_name": "w", "city": "x", "more": 1},
        {"_name": "no_tool"},
        "{}",
        '{"function": {}}',
        '{"function": {"_name": "w", "city": "x"}, "more": 1}',
    ]
    assert accepted([("w", WEATHER)], right + wrong) == [True] * 2 + [False] * 9


def test_the_alternative_to_call_nothing() -> None:
    calls = [{"_name": "no_tool"}, {"_name": "no_tool", "a": 1}, {"_name": "w", "city": ""}]
    assert accepted([("w", WEATHER)], calls, or_none=True) == [True, False, True]


def test_parameters_are_what_their_reference_names() -> None:
    for name, reference in (("a b", "#/$defs/a%20b"), ("a/b", "#/$defs/a~1b")):
        parameters = {"$ref": reference, "$defs": {name: WEATHER}}
        assert accepted([("w", parameters)], [{"_name": "w", "city": "x"}, {"_name": "w"}]) == [True, False]


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters(parameters: Any) -> None:
    assert accepted([("f", parameters)], [{"_name": "f"}, {"_name": "f", "a": 1}]) == [True, False]


@pytest.mark.parametrize(
    ("others", "expected"),
    [(None, [True, False, False]), (False, [True, False, False]), (True, [True, True, True]),
     ("true", [True, True, True]), ({"type": "integer"}, [True, True, False])],
)  # fmt: skip
def test_additional_properties(others: Any, expected: list[bool]) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    if others is not None:
        parameters["additionalProperties"] = others
    calls = [{"_name": "f", "a": 1}, {"_name": "f", "a": 1, "b": 1}, {"_name": "f", "b": "x"}]
    assert accepted([("f", parameters)], calls) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"enum": ["a", "b"]}, [True, True, False]),
        ({"$ref": "#/$defs/k"}, [True, True, False]),
        ({"pattern": "^[ab]$"}, [True, True, False]),
        ({"maxLength": 1}, [True, True, False]),
    ],
)
def test_names_of_arguments_say_nothing_of_the_functions(names: Any, expected: list[bool]) -> None:
    parameters = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    calls = [{"_name": "f"}, {"_name": "f", "a": 1}, {"_name": "f", "other": 1}]
    tools = [("f", {**parameters, "$defs": {"k": {"enum": ["a"]}}})]
    assert accepted(tools, calls) == expected
    if "enum" in names:
        assert accepted([("f", {**parameters, "properties": {"a": {"type": "integer"}}})], calls) == expected
    with pytest.raises(ToolError, match="`f` cannot be enforced: `propertyNames` with `format`"):
        call_schema([("f", {**parameters, "propertyNames": {"format": "uuid"}})], or_none=False)


def test_all_tools_of_a_request_share_the_time_of_their_patterns() -> None:
    """Each of these takes some milliseconds, all of them a minute."""
    properties: dict[str, Any] = {"a" * 18 + "!": {}}
    parameters = {"type": "object", "propertyNames": {"pattern": "^(a|a)*$"}, "properties": properties}
    one = [("f", parameters)]
    assert accepted(one, [{"_name": "f"}, {"_name": "f", "a" * 18 + "!": 1}]) == [True, False]
    with pytest.raises(ToolError, match=r"`f\d+` cannot be enforced: the `pattern` of `propertyNames` takes too long"):
        call_schema([(f"f{number}", parameters) for number in range(10_000)], or_none=False)


def test_names_of_arguments_behind_an_anchor() -> None:
    parameters = {"type": "object", "propertyNames": {"$ref": "#k"}, "$defs": {"k": {"$anchor": "k", "enum": ["a"]}}}
    calls = [{"_name": "f", "a": 1}, {"_name": "f", "b": 1}]
    assert accepted([("f", parameters)], calls) == [True, False]
    for reference in ("#none", "#/$defs/none", "https://example.com/k"):
        with pytest.raises(ToolError, match="`f` have a reference that does not resolve"):
            call_schema([("f", parameters | {"propertyNames": {"$ref": reference}})], or_none=False)


@pytest.mark.parametrize(
    "others",
    [
        {"examples": [{"$anchor": "k", "enum": ["b"]}], "$defs": {"k": {"$anchor": "k", "enum": ["a"]}}},
        {"$defs": {"k": {"$anchor": "k", "enum": ["a"]}}, "default": {"$anchor": "k", "enum": ["b"]}},
        {"$defs": {"example": {"$anchor": "k", "enum": ["a"]}}},
        {"$defs": {"l": {"items": {"$dynamicAnchor": "k", "enum": ["a"]}}}},
        {"definitions": {"k": {"$id": "#k", "enum": ["a"]}}},
    ],
)
def test_anchors_of_names_are_those_of_schemas(others: dict[str, Any]) -> None:
    tool = "f", {"type": "object", "propertyNames": {"$ref": "#k"}, **others}
    assert accepted([tool], [{"_name": "f", "a": 1}, {"_name": "f", "b": 1}]) == [True, False]


def test_references_of_two_tools_do_not_meet() -> None:
    def parameters(kind: str) -> Any:
        return {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}, "y": {"$ref": "#/definitions/Y"}, "self": {"$ref": "#"}},
            "$defs": {"X": {"type": kind}},
            "definitions": {"Y": {"type": "array", "items": {"$ref": "#/$defs/X"}}},
        }

    calls = [
        {"_name": "f", "x": 1, "y": [2]},
        {"_name": "f", "x": "1"},
        {"_name": "g", "x": "1", "y": ["2"], "self": {"x": "3", "self": {}}},
        {"_name": "g", "x": 1},
    ]
    functions = [("f", parameters("integer")), ("g", parameters("string"))]
    assert accepted(functions, calls) == [True, False, True, False]


def test_parameters_that_are_a_reference_or_a_choice() -> None:
    one = {"$ref": "#/$defs/P", "$defs": {"P": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    two = {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"$ref": "#/$defs/Q"}],
           "$defs": {"Q": {"allOf": [{"properties": {"b": {}}, "required": ["b"]}]}}}  # fmt: skip
    calls = [
        {"_name": "one", "a": 1},
        {"_name": "one", "b": 1},
        {"_name": "two", "a": 1},
        {"_name": "two", "b": [None]},
        {"_name": "two"},
        {"_name": "two", "a": 1, "b": 1},
    ]
    assert accepted([("one", one), ("two", two)], calls) == [True, False, True, True, False, False]


OVERLAP = "a `oneOf` whose branches overlap cannot be enforced: use `anyOf`, or branches that exclude each other"
A, B = ({"properties": {key: {"type": "integer"}}} for key in "ab")


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"oneOf": [A, B]}, f"/oneOf: {OVERLAP}"),
        ({"oneOf": [A, {"$ref": "#/$defs/B"}], "$defs": {"B": B}}, f"/oneOf: {OVERLAP}"),
        ({"anyOf": [A, {"oneOf": [A, {"anyOf": [B, A]}]}]}, f"/oneOf: {OVERLAP}"),
        # By what they say themselves the second takes what the first does.
        ({"oneOf": [A | {"required": ["a"]}, B]}, "/oneOf: the branches of a `oneOf` exclude each other only where "),
        ({"properties": {"x": {"oneOf": [A, B]}}}, f"/properties/x/oneOf: {OVERLAP}"),
        ({"properties": {"x": {"$ref": "#"}}, "required": ["x"]}, ": no value that fits has an end, since "),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, "/properties/x: no value that fits has an end, since "),
    ],
)
def test_what_cannot_be_enforced_is_said_of_the_function_and_its_own_places(parameters: Any, fault: str) -> None:
    schema, words = call_schema_in_words([("g", None), ("f", {"type": "object"} | parameters)], or_none=True)
    said = check("json", json.dumps(schema), _BYTES)["fault"]
    text = AskedGrammar("json", schema, words=words).in_clients_words(said)
    assert text.startswith(f"the parameters of the function `f`, #{fault}"), (said, text)


def test_branches_that_exclude_each_other_are_calls() -> None:
    parameters = {"oneOf": [A | {"required": ["a"]}, B | {"required": ["b"]}, {"$ref": "#/$defs/c"}],
                  "$defs": {"c": {"properties": {"a": {"type": "string"}}, "required": ["a"]}}}  # fmt: skip
    calls = [{"_name": "f", "a": 1}, {"_name": "f", "b": 1}, {"_name": "f", "a": "x"}, {"_name": "f"}]
    assert accepted([("f", parameters)], calls) == [True, True, True, False]


def test_a_property_called_like_a_keyword_and_data_that_look_like_a_reference() -> None:
    parameters = {
        "properties": {"default": {"$ref": "#/$defs/X"}, "$ref": {"type": "null"}, "c": {"const": {"$ref": "#/x"}}},
        "$defs": {"X": {"type": "integer"}},
    }
    calls = [{"_name": "f", "default": 1, "$ref": None, "c": {"$ref": "#/x"}}, {"_name": "f", "default": "1"}]
    assert accepted([("f", parameters)], calls) == [True, False]


def test_names_with_quotes() -> None:
    assert accepted([('a"\\b é', None)], [{"_name": 'a"\\b é'}, json.dumps({"function": {"_name": 'a"\\b é'}},
                    ensure_ascii=False)]).count(True) >= 1  # fmt: skip


@pytest.mark.parametrize(
    "parameters",
    [
        [], "x", 3, True,
        {"type": "string"}, {"type": ["string", "null"]}, {"type": 3},
        {"properties": []}, {"required": {}}, {"properties": {"_name": {}}},
        {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "http://x/y"}, {"$ref": 3}, {"$ref": "#/$defs/a/b",
        "$defs": {"a": []}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"anyOf": []}, {"anyOf": {}}, {"anyOf": [True]}, {"anyOf": [{}] * 65},
        {"anyOf": [{"anyOf": [{}] * 20}] * 20},
    ],
)  # fmt: skip
def test_parameters_that_no_call_can_have(parameters: Any) -> None:
    with pytest.raises(ToolError, match="`f`"):
        call_schema([("f", parameters)], or_none=False)
