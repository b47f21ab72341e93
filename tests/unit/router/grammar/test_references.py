"""Where references lead: what they name is enforced and closed wherever it is, and nothing else is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from router.grammar.references import Places, at, step
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
    places = Places({"$schema": "https://json-schema.org/draft/2020-12/schema"})
    (here,) = places.address
    assert places.find("#", (here,)) == "#" and places.find("#/a~1b/0", (here,)) == step("#", "a/b", 0)
    assert places.add({"$id": "urn:x"}, "#/$defs/x", (here,)) == ("urn:x",)
    assert places.find("#/a", ("urn:x",)) == "#/$defs/x/a" and places.find("urn:x", (here,)) == "#/$defs/x"
    assert places.add({"$id": "#old"}, "#/y", (here,)) == (here,) and places.find("#old", (here,)) == "#/y"
    assert places.find("other.json", (here,)) is None and len(places) == 3


SIBLING = {
    "type": "object", "required": ["v"],
    "properties": {"v": {"allOf": [{"$id": "http://a.b/other/", "$ref": "x.json"}]}},
    "definitions": {
        "x": {"$id": "http://a.b/x.json", "type": "number"}, "y": {"$id": "http://a.b/other/x.json", "type": "string"},
    },
    "$id": "http://a.b/root",
}  # fmt: skip
OLDEST = {
    "type": "object", "required": ["v"],
    "properties": {
        "v": {"id": "http://a.b/i", "definitions": {"x": {"type": "number"}}, "allOf": [{"$ref": "#/definitions/x"}]}
    },
    "definitions": {"x": {"type": "string"}},
}  # fmt: skip


@pytest.mark.parametrize("schema", [SIBLING, OLDEST])
def test_what_versions_read_otherwise_needs_its_version(schema: dict[str, Any]) -> None:
    fault = check("json", json.dumps(schema), TOKENIZER)["fault"]
    assert fault.endswith("leads elsewhere in older versions of JSON Schema: say in `$schema` which is meant"), fault


@pytest.mark.parametrize(
    ("schema", "draft", "is_text"),
    [
        (SIBLING, "http://json-schema.org/draft-07/schema#", False),
        (SIBLING, "http://json-schema.org/draft-06/schema#", False),
        (SIBLING, "https://json-schema.org/draft/2019-09/schema", True),
        (OLDEST, "http://json-schema.org/draft-04/schema#", False),
        (OLDEST, "https://json-schema.org/draft/2020-12/schema", True),
    ],
)
def test_a_reference_leads_where_the_draft_says(schema: dict[str, Any], draft: str, is_text: bool) -> None:
    named = {"$schema": draft} | schema
    assert takes(named, {"v": "a"}) is is_text and takes(named, {"v": 1}) is not is_text


def test_an_id_that_is_a_remark_changes_nothing() -> None:
    schema = {"id": "tool", "type": "object", "properties": {"v": {"id": "field", "$ref": "#/$defs/x"}}}
    assert takes(schema | {"$defs": {"x": {"type": "integer"}}}, {"v": 1})


def test_names_of_keys_are_those_of_the_document_that_they_are_in() -> None:
    inner = {
        "$id": "http://a.b/inner", "type": "object", "propertyNames": {"$ref": "#/$defs/n"},
        "$defs": {"n": {"enum": ["b"]}},
    }  # fmt: skip
    schema = {"type": "object", "properties": {"v": inner}, "$defs": {"n": {"enum": ["a"]}}}
    assert takes(schema, {"v": {"b": 1}}) and not takes(schema, {"v": {"a": 1}})


def test_a_place_in_a_list_that_no_list_has_is_nothing() -> None:
    """Python refuses to read numbers of thousands of digits."""
    assert at({"a": [1]}, "#/a/0") == 1
    assert at({"a": [1]}, "#/a/1") is None and at({"a": [1]}, "#/a/" + "9" * 5000) is None
