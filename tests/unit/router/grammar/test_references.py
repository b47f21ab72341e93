"""Where references lead: what they name is enforced and closed wherever it is, and nothing else is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from router.grammar.references import Places, step
from router.grammar.worker import _Bytes, check
from wire.grammar import compile_grammar

TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))
# Their parts are within one unit, which the library alone does not exclude.
HALF = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


def takes(schema: Any, value: Any) -> bool:
    checked = check("json", json.dumps(schema), TOKENIZER)
    assert "fault" not in checked, (schema, checked)
    matcher = compile_grammar("json", checked["grammar"], TOKENIZER, [256])
    text = json.dumps(value, separators=(",", ":")).encode()
    return bool(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("reference", "others"),
    [
        ("#/$defs/x", {"$defs": {"x": HALF}}),
        ("#/$defs/x/$defs/y", {"$defs": {"x": {"$defs": {"y": HALF}}}}),
        ("#/components/schemas/x", {"components": {"schemas": {"x": HALF}}}),
        ("#/$defs/x%20y~1z", {"$defs": {"x y/z": HALF}}),
        ("#/examples/0", {"examples": [HALF]}),
        ("#/properties/w/items/0", {"properties": {"v": {}, "w": {"items": [HALF]}}}),
        ("#/additionalItems", {"items": [True], "additionalItems": HALF}),
        ("#half", {"$defs": {"x": {"$anchor": "half", **HALF}}}),
        ("https://example.com/half", {"$defs": {"x": {"$id": "https://example.com/half", **HALF}}}),
        ("half", {"$id": "https://example.com/", "$defs": {"x": {"$id": "half", **HALF}}}),
        ("https://example.com/a#/$defs/x", {"$id": "https://example.com/a", "$defs": {"x": HALF}}),
        ("#/$defs/x", {"$defs": {"x": {"$ref": "#/components/x"}}, "components": {"x": HALF}}),
    ],
)
def test_what_a_reference_names_is_enforced(reference: str, others: dict[str, Any]) -> None:
    schema = {"type": "object", **others, "required": ["v"]}
    schema["properties"] = {**others.get("properties", {}), "v": {"$ref": reference}}
    assert takes(schema, {"v": 0.25}) and not takes(schema, {"v": 0}) and not takes(schema, {"v": 0.75})


@pytest.mark.parametrize(
    ("reference", "others"),
    [
        ("#/$defs/x", {"$defs": {"x": A}}),
        ("#/$defs/x%20y", {"$defs": {"x y": A}}),
        ("#/components/x", {"components": {"x": A}}),
        ("#part", {"$defs": {"x": {"$anchor": "part", **A}}}),
        ("https://example.com/part", {"$defs": {"x": {"$id": "https://example.com/part", **A}}}),
        ("https://example.com/a#/$defs/x", {"$id": "https://example.com/a", "$defs": {"x": A}}),
    ],
)
def test_what_is_merged_is_not_closed_however_it_is_named(reference: str, others: dict[str, Any]) -> None:
    assert takes({"allOf": [{"$ref": reference}, B], **others}, {"a": 1, "b": 2})
    alone = {"$ref": reference, **others}
    assert takes(alone, {"a": 1}) and not takes(alone, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/y", "$defs": {"x": {}}},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/enum/0", "enum": [HALF]},
        {"$ref": "#/not", "not": HALF},
        {"properties": {"a": {"$ref": "#nowhere"}}},
    ],
)
def test_what_leads_nowhere_is_refused(schema: dict[str, Any]) -> None:
    reference = schema.get("$ref", "#nowhere")
    assert check("json", json.dumps(schema), TOKENIZER)["fault"] == (
        f"the `$ref` {reference} leads to no schema within this one"
    )


def test_a_schema_within_a_document_of_its_own_names_what_is_within() -> None:
    inner = {"$id": "https://example.com/inner", "$ref": "#/$defs/x", "$defs": {"x": HALF}}
    schema = {"type": "object", "properties": {"v": inner}, "$defs": {"x": {"type": "string"}}, "required": ["v"]}
    assert takes(schema, {"v": 0.5}) and not takes(schema, {"v": 0}) and not takes(schema, {"v": "a"})


def test_paths() -> None:
    places = Places()
    assert places.find("#", "") == "#" and places.find("#/a~1b/0", "") == step("#", "a/b", 0)
    assert places.add({"$id": "urn:x"}, "#/$defs/x", "") == "urn:x"
    assert places.find("#/a", "urn:x") == "#/$defs/x/a" and places.find("urn:x", "") == "#/$defs/x"
    assert places.add({"$id": "#old"}, "#/y", "") == "" and places.find("#old", "") == "#/y"
    assert places.find("other.json", "") is None and len(places) == 3
