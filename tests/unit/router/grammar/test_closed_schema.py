"""Which objects of a schema are closed, what is an object, and which formats are enforced."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from router.grammar.closed_schema import _FORMATS, close_objects
from router.grammar.worker import _Bytes, check
from wire.grammar import compile_grammar

NO = {"additionalProperties": False}
OBJECT = {"type": "object"}
A: dict[str, Any] = OBJECT | {"properties": {"a": {"type": "string"}}}
B: dict[str, Any] = OBJECT | {"properties": {"b": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, A | NO),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {}}, {"properties": {}} | NO | OBJECT),
        (A | {"additionalProperties": True}, A | {"additionalProperties": True}),
        (A | {"additionalProperties": B}, A | {"additionalProperties": B | NO}),
        (A | {"required": ["a"]}, A | {"required": ["a"]} | NO),
        (A | {"required": ["z"]}, A | {"required": ["z"]}),
        ({"items": A}, {"items": A | NO}),
        ({"prefixItems": [A]}, {"prefixItems": [A | NO]}),
        ({"properties": {"properties": A}}, {"properties": {"properties": A | NO}} | NO | OBJECT),
        ({"anyOf": [A, B]}, {"anyOf": [A | NO, B | NO]}),
        (A | {"anyOf": [B]}, A | {"anyOf": [B]}),
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({"allOf": [A]}, {"allOf": [A | NO]}),
        ({"allOf": [{"items": A}, B]}, {"allOf": [{"items": A | NO}, B]}),
        ({"enum": [A]}, {"enum": [A]}),
        ({"$ref": "#/$defs/x", "$defs": {"x": A}}, {"$ref": "#/$defs/x", "$defs": {"x": A | NO}}),
        (
            {"allOf": [{"$ref": "#/$defs/x"}, B], "$defs": {"x": {"$ref": "#/$defs/y~1"}, "y/": A}},
            {"allOf": [{"$ref": "#/$defs/x"}, B], "$defs": {"x": {"$ref": "#/$defs/y~1"}, "y/": A}},
        ),
        (A | {"$ref": "#/$defs/x", "$defs": {"x": B}}, A | {"$ref": "#/$defs/x", "$defs": {"x": B}}),
        (True, True),
        ({"properties": 3}, {"properties": 3}),
        (
            OBJECT | {"properties": {"a": False}, "required": "a"},
            OBJECT | {"properties": {"a": False}, "required": "a"} | NO,
        ),
        ({"type": "string", "properties": {}}, {"type": "string", "properties": {}} | NO),
        ({"enum": [1], "properties": {}}, {"enum": [1], "properties": {}} | NO),
        ({"type": "string", "format": "email"}, {"type": "string", "format": "email"}),
        ({"type": "string", "format": "path"}, {"type": "string"}),
        ({"items": {"format": "regex"}}, {"items": {}}),
        (OBJECT | {"properties": {"format": {"format": "x"}}}, OBJECT | {"properties": {"format": {}}} | NO),
    ],
)
def test_close_objects(schema: Any, expected: Any) -> None:
    assert close_objects(schema) == expected


def test_order_is_kept() -> None:
    closed = close_objects(OBJECT | {"properties": {"z": A, "y": B}})
    assert list(closed["properties"]) == ["z", "y"]


def test_formats_are_those_that_the_library_enforces() -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    for name in (*_FORMATS, "path", "regex", "uri-reference", "password", "binary", "int32", "idn-email"):
        schema = orjson.dumps({"type": "string", "format": name}).decode()
        matcher = compile_grammar("json", schema, tokenizer, [256])
        assert matcher.is_error() is (name not in _FORMATS), name
        matcher = compile_grammar("json", check("json", schema, tokenizer)["grammar"], tokenizer, [256])
        assert not matcher.is_error() and (matcher.try_consume_tokens(list(b'"?"')) < 3) is (name in _FORMATS), name


def test_an_object_is_meant_at_every_level_where_properties_are() -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    inner = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
    grammar = check("json", orjson.dumps({"properties": {"a": inner}, "required": ["a"]}).decode(), tokenizer)[
        "grammar"
    ]
    for text, fits in ((b'{"a":{"b":1}}', True), (b"3", False), (b'{"a":3}', False), (b"[]", False)):
        matcher = compile_grammar("json", grammar, tokenizer, [256])
        assert (matcher.try_consume_tokens(list(text)) == len(text)) is fits, text


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"items": {"type": "integer"}}, ["[1]", '"a"', "{}"], ['["a"]', "[[1]]"]),
        ({"items": [{"type": "integer"}], "additionalItems": {"type": "null"}}, ["[1,null]", "2"], ['["a"]', "[1,2]"]),
        ({"prefixItems": [{"type": "integer"}]}, ["[1,null]", "2"], ['["a"]']),
        ({"minItems": 1, "maxItems": 1}, ["[1]", '""'], ["[]", "[1,1]"]),
        ({"minimum": 2, "exclusiveMaximum": 4}, ["2", "3", '"a"', "[0]"], ["1", "4"]),
        ({"multipleOf": 2}, ["4", '"a"'], ["3"]),
        ({"minLength": 2, "pattern": "^a"}, ['"ab"', "1"], ['"a"', '"bb"']),
        ({"format": "date"}, ['"2020-02-02"', "1"], ['"a"']),
        ({"required": ["a"]}, ['{"a":1}', "1"], ["{}"]),
        ({"additionalProperties": {"type": "integer"}}, ['{"a":1}', '"a"'], ['{"a":"x"}']),
        ({"patternProperties": {"^a": {"type": "integer"}}}, ['{"a":1}', '{"b":"x"}', "[]"], ['{"a":"x"}']),
        ({"propertyNames": {"pattern": "^a"}}, ['{"a":1}', "1"], ['{"b":1}']),
        ({"properties": {"a": {"type": "integer"}}}, ['{"a":1}'], ['{"a":"x"}', "1"]),
    ],
)
def test_keywords_without_a_type_bind_the_values_that_they_are_about(
    schema: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    definition = {"$defs": {"x": schema}}
    places: list[tuple[dict[str, Any], str]] = [
        (schema, "%s"),
        ({"allOf": [schema]}, "%s"),
        ({"anyOf": [schema]}, "%s"),
        ({"$ref": "#/$defs/x", **definition}, "%s"),
        ({"properties": {"v": schema}, "required": ["v"]}, '{"v":%s}'),
        ({"items": schema, "minItems": 1}, "[%s]"),
        ({"prefixItems": [schema], "minItems": 1}, "[%s]"),
        ({"items": [schema], "minItems": 1}, "[%s]"),
        ({"items": [True], "additionalItems": schema, "minItems": 2}, "[0,%s]"),
        ({"additionalProperties": schema, "minProperties": 1, "type": "object"}, '{"v":%s}'),
    ]
    for whole, form in places:
        grammar = check("json", orjson.dumps(whole).decode(), tokenizer)["grammar"]
        for text, fits in [*((one, True) for one in taken), *((one, False) for one in refused)]:
            matcher, written = compile_grammar("json", grammar, tokenizer, [256]), (form % text).encode()
            can_come = matcher.try_consume_tokens(list(written)) == len(written) and matcher.is_accepting()
            assert can_come is fits, (whole, text)
