"""Conditions: every valid instance of these can be written, no invalid one, by jsonschema's judgement."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from router.grammar.negated import pattern_of_others
from router.grammar.worker import _Bytes, check
from wire.grammar import compile_grammar

TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))
OBJECTS = [
    dict(zip(("a", "b", "c"), values, strict=True)) for values in itertools.product((None, 1, 2, "x", "xy"), repeat=3)
]
OBJECTS = [{key: value for key, value in one.items() if value is not None} for one in OBJECTS]
SCALARS: list[Any] = [None, True, False, 0, 1, -1, 0.5, 1.5, 2, "", "x", "xy", "y", 'q"', "\\", [], [1], {}, {"a": 1}]
ARRAYS: list[Any] = [list(items) for count in range(4) for items in itertools.product((1, 2, "x"), repeat=count)]
ABC = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}}
IF_A = {"properties": {"a": {"const": 1}}, "required": ["a"]}


def compiled(schema: dict[str, Any]) -> LLMatcher:
    checked = check("json", json.dumps(schema), TOKENIZER)
    assert "fault" not in checked, checked
    return compile_grammar("json", checked["grammar"], TOKENIZER, [256])


def takes(matcher: LLMatcher, value: object) -> bool:
    text, matcher = json.dumps(value, separators=(",", ":")).encode(), matcher.deep_copy()
    return bool(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "instances"),
    [
        (ABC | {"if": IF_A, "then": {"required": ["b"]}}, OBJECTS),
        (ABC | {"if": IF_A, "then": {"required": ["b"]}, "else": {"required": ["c"]}}, OBJECTS),
        (ABC | {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, OBJECTS),
        (ABC | {"if": {"properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}, "then": {
            "properties": {"b": {"type": "string"}}}, "else": {"properties": {"b": {"type": "integer"}}}}, OBJECTS),
        (ABC | {"if": IF_A, "then": {"if": {"required": ["b"]}, "then": {"required": ["c"]}}}, OBJECTS),
        (ABC | {"allOf": [{"if": IF_A, "then": {"required": ["b"]}},
                          {"if": {"required": ["b"]}, "then": {"required": ["c"]}}]}, OBJECTS),
        (ABC | {"if": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "else": {"required": ["c"]}}, OBJECTS),
        (ABC | {"dependentSchemas": {"a": {"required": ["b"], "properties": {"c": {"type": "string"}}}}}, OBJECTS),
        (ABC | {"not": {"required": ["a", "b"]}}, OBJECTS),
        (ABC | {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b", "c"]}]}}, OBJECTS),
        (ABC | {"not": IF_A}, OBJECTS),
        (ABC | {"unevaluatedProperties": False}, OBJECTS),
        ({"type": "object", "properties": {"a": {"not": {"const": 1}}, "b": {"type": "string", "not": {"enum": ["x"]}},
                                           "c": {"not": {"type": ["string", "null"]}}}}, OBJECTS),
        ({"not": {"const": None}}, SCALARS),
        ({"not": {"enum": ["x", 1, True]}}, SCALARS),
        ({"not": {"enum": ["", 'q"', "\\"]}}, SCALARS),
        ({"type": "string", "minLength": 1, "not": {"enum": ["xy", "y"]}}, SCALARS),
        ({"enum": ["x", "y", 1, 2, None], "not": {"enum": ["y", 2]}}, SCALARS),
        ({"type": "integer", "minimum": -1, "not": {"const": 0}}, SCALARS),
        ({"type": "number", "not": {"enum": [0, 1]}}, SCALARS),
        ({"not": {"type": ["array", "object", "number"]}}, SCALARS),
        ({"type": ["string", "null"], "not": {"const": ""}}, SCALARS),
        ({"type": "string", "not": {"maxLength": 1}}, SCALARS),
        ({"type": "string", "if": {"minLength": 2}, "then": {"maxLength": 3}}, SCALARS),
        ({"type": "array", "contains": {"const": "x"}}, ARRAYS),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 2}}, ARRAYS),
        ({"type": "array", "prefixItems": [{"const": 1}], "contains": {"const": 2}, "maxItems": 2}, ARRAYS),
        ({"type": "array", "prefixItems": [{"const": 1}, {}], "items": False, "contains": {"const": 2}}, ARRAYS),
    ],
)  # fmt: skip
def test_what_can_be_written_is_what_is_valid(schema: dict[str, Any], instances: list[Any]) -> None:
    matcher, judge = compiled(schema), jsonschema.Draft202012Validator(schema)
    for one in instances:
        assert takes(matcher, one) == judge.is_valid(one), one


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"pattern": "^a"}}, "`not` cannot be enforced"),
        ({"not": {"type": "integer"}}, "`not` cannot be enforced"),
        ({"not": {"const": {"a": 1}}}, "`not` cannot be enforced"),
        ({"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {}}}, "`not` cannot be enforced"),
        ({"if": {"format": "email"}, "then": {"minLength": 9}}, "`if`, `then` cannot be enforced"),
        ({"contains": {"const": 1}}, "`contains` cannot be enforced"),
        ({"type": "array", "contains": {}, "minContains": 2}, "`contains`, `minContains` cannot be enforced"),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "`unevaluatedProperties`"),
        ({"unevaluatedItems": False}, "`unevaluatedItems` cannot be enforced"),
    ],
)
def test_other_forms_are_refused_by_name(schema: dict[str, Any], said: str) -> None:
    assert said in check("json", json.dumps(schema), TOKENIZER)["fault"]


def test_conditions_of_an_objects_own_keys_leave_it_closed() -> None:
    matcher = compiled(ABC | {"if": IF_A, "then": {"required": ["b"]}})
    assert takes(matcher, {"a": 2}) and not takes(matcher, {"a": 2, "d": 1})
    other = compiled(ABC | {"if": IF_A, "then": {"properties": {"d": {"type": "string"}}, "required": ["d"]}})
    assert takes(other, {"a": 1, "d": "x"}) and not takes(other, {"a": 1, "d": 1}) and not takes(other, {"a": 1})


@pytest.mark.parametrize("texts", [["abc"], ["a", "ab", ""], ["^x]", '-\\"', "é"]])
def test_texts_that_are_none_of_those_given(texts: list[str]) -> None:
    matcher = compile_grammar("regex", pattern_of_others(texts), TOKENIZER, [256])
    for one in ("", "a", "b", "ab", "abc", "abcd", "^x]", '-\\"', "-", "é", "ê"):
        walker, written = matcher.deep_copy(), list(one.encode())
        fits = walker.try_consume_tokens(written) == len(written) and walker.is_accepting()
        assert fits == (one not in texts), one
