"""Branches of `oneOf` with `properties` and without a type, which JSON Schema fits to all that is no object."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from router.grammar.worker import _Bytes, check
from wire.grammar import compile_grammar

TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))
A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
OBJECT = {"type": "object"}
DEFINITIONS = {
    "$defs": {"a": A, "object": A | OBJECT, "text": {"type": "string"}, "a_or_text": {"anyOf": [A, {"type": "string"}]}}
}


@pytest.mark.parametrize(
    "branches",
    [
        [A, {"type": "string"}],
        [{"type": ["string", "null"]}, A],
        [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/text"}],
        [{"allOf": [A]}, {"enum": [1]}],
        [{"$ref": "#/$defs/a_or_text"}, {"type": "integer"}],
        [A, {"minItems": 2}],
    ],
)
def test_a_value_that_fits_two_branches_is_not_written(branches: list[Any]) -> None:
    for schema in ({"oneOf": branches}, {"type": "object", "properties": {"v": {"items": {"oneOf": branches}}}}):
        fault = check("json", json.dumps(schema | DEFINITIONS), TOKENIZER)["fault"]
        assert fault.startswith("a branch of `oneOf` with `properties` needs its `type`"), fault


@pytest.mark.parametrize(
    ("branches", "other"),
    [
        ([A | OBJECT, {"type": "string"}], "x"),
        ([A, B], {"b": 1}),
        ([A, B | OBJECT], {"b": 1}),
        ([A, {"allOf": [B | OBJECT]}], {"b": 1}),
        ([A, {"anyOf": [B, B | OBJECT]}], {"b": 1}),
    ],
)
def test_objects_may_be_told_by_their_keys(branches: list[Any], other: Any) -> None:
    checked = check("json", json.dumps({"oneOf": branches} | DEFINITIONS), TOKENIZER)
    assert "fault" not in checked, checked
    for value in ({"a": 1}, other):
        matcher = compile_grammar("json", checked["grammar"], TOKENIZER, [256])
        text = json.dumps(value, separators=(",", ":")).encode()
        assert matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting(), value
