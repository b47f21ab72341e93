"""Which objects of a schema are closed."""

from __future__ import annotations

from typing import Any

import pytest

from router.grammar.closed_schema import close_objects

NO = {"additionalProperties": False}
A: dict[str, Any] = {"properties": {"a": {"type": "string"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, A | NO),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {}}, {"properties": {}} | NO),
        (A | {"additionalProperties": True}, A | {"additionalProperties": True}),
        (A | {"additionalProperties": B}, A | {"additionalProperties": B | NO}),
        (A | {"required": ["a"]}, A | {"required": ["a"]} | NO),
        (A | {"required": ["z"]}, A | {"required": ["z"]}),
        ({"items": A}, {"items": A | NO}),
        ({"prefixItems": [A]}, {"prefixItems": [A | NO]}),
        ({"properties": {"properties": A}}, {"properties": {"properties": A | NO}} | NO),
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
        ({"properties": {"a": False}, "required": "a"}, {"properties": {"a": False}, "required": "a"} | NO),
    ],
)
def test_close_objects(schema: Any, expected: Any) -> None:
    assert close_objects(schema) == expected


def test_order_is_kept() -> None:
    closed = close_objects({"properties": {"z": A, "y": B}})
    assert list(closed["properties"]) == ["z", "y"]
