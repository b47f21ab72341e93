"""Schemas whose values would have no end are refused, and those that refer to themselves and end are not."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from router.grammar.worker import _Bytes, check

TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))
OBJECT = {"type": "object"}
SELF = {"$ref": "#"}
OLD = {"$schema": "http://json-schema.org/draft-07/schema#"}


def holding(name: str, schema: Any = SELF, **others: Any) -> dict[str, Any]:
    return OBJECT | {"properties": {name: schema}, "required": [name]} | others


def within(schema: Any) -> dict[str, Any]:
    """A list whose values end themselves."""
    return {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": schema}}


X = {"$ref": "#/$defs/x"}


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("#", holding("v")),
        ("#", {"type": "array", "items": SELF, "minItems": 1}),
        ("#", {"type": "array", "prefixItems": [True, SELF], "minItems": 2}),
        ("#", OLD | {"type": "array", "items": [SELF], "minItems": 1}),
        ("#", {"type": "array", "contains": SELF}),
        ("#", {"anyOf": [holding("a"), holding("b")]}),
        ("#", {"allOf": [OBJECT | {"required": ["a"]}, {"properties": {"a": SELF}}]}),
        ("#", OBJECT | {"additionalProperties": SELF, "minProperties": 1}),
        ("#", OBJECT | {"patternProperties": {"^a": SELF}, "additionalProperties": False, "minProperties": 1}),
        ("#", {"$anchor": "me"} | holding("v", {"$ref": "#me"})),
        ("#", {"$id": "https://example.com/a"} | holding("v", {"$ref": "https://example.com/a"})),
        ("#", SELF),
        # Where a value may do without, too: it is entered, and never left.
        ("#/properties/v", OBJECT | {"properties": {"v": {"$ref": "#/properties/v"}}}),
        ("#/additionalProperties", OBJECT | {"additionalProperties": {"$ref": "#/additionalProperties"}}),
        ("#/$defs/x", within(holding("v", X))),
        ("#/$defs/x", within({"allOf": [X]})),
        ("#/$defs/x", OLD | within({"$ref": "#/$defs/x", "type": "string"})),
        ("#/$defs/x", within(holding("v", holding("w", {"type": "array", "items": X, "minItems": 1})))),
        ("#/$defs/x", {"anyOf": [{"type": "null"}, X], "$defs": {"x": holding("v", X)}}),
        # A branch is the schema itself, with others or alone.
        ("#/$defs/x", within({"anyOf": [X, holding("v", X)]}) | {"minItems": 1}),
        ("#/$defs/x", within({"anyOf": [X, holding("v", X)]})),
        ("#/$defs/x", within({"anyOf": [{"allOf": [X]}]})),
        ("#/$defs/x", within({"oneOf": [holding("v", X), {"type": "null", "allOf": [X]}]})),
        # Another leads to the one that is named.
        ("#/$defs/x", {"$ref": "#/$defs/a", "$defs": {"a": holding("v", X), "x": holding("v", X)}}),
    ],
)
def test_what_has_no_end_is_refused(path: str, schema: dict[str, Any]) -> None:
    fault = check("json", json.dumps(schema), TOKENIZER)["fault"]
    assert fault == f"{path}: no value that fits has an end, since a `$ref` leads to itself without end"


@pytest.mark.parametrize(
    "schema",
    [
        OBJECT | {"properties": {"v": SELF}},
        {"type": "array", "items": SELF},
        holding("v", {"anyOf": [SELF, {"type": "null"}]}),
        {"anyOf": [SELF, {"type": "null"}]},
        holding("v", {"type": "array", "items": SELF}),
        OBJECT | {"additionalProperties": SELF},
        within({"type": ["object", "string"], "properties": {"v": X}, "required": ["v"]}),
        within({"allOf": [{"$ref": "#/$defs/y"}, {"$ref": "#/$defs/y"}]}) | {"$defs": {"x": {}, "y": {}}},
        {"type": "integer", "$defs": {"unused": holding("v", {"$ref": "#/$defs/unused"})}},
        OBJECT | {"properties": {"a": False, "b": {"minimum": 2, "maximum": 1, "type": "integer"}, "c": SELF}},
    ],
)
def test_what_refers_to_itself_and_ends_is_served(schema: dict[str, Any]) -> None:
    assert "fault" not in check("json", json.dumps(schema), TOKENIZER)


def test_a_long_way_round_and_many_ways_that_meet() -> None:
    names = [f"d{number}" for number in range(60)]
    ring = {
        name: holding("v", {"$ref": f"#/$defs/{after}"})
        for name, after in zip(names, names[1:] + names[:1], strict=True)
    }
    fault = check("json", json.dumps({"$ref": "#/$defs/d0", "$defs": ring}), TOKENIZER)["fault"]
    assert fault.startswith("#/$defs/d1: no value that fits has an end")
    both = {
        name: OBJECT | {"properties": {key: {"$ref": f"#/$defs/{after}"} for key in "ab"}, "required": ["a", "b"]}
        for name, after in pairwise(names)
    }
    schema = {"type": "array", "items": {"$ref": "#/$defs/d0"}, "$defs": {**both, names[-1]: {"type": "null"}}}
    assert "fault" not in check("json", json.dumps(schema), TOKENIZER)
