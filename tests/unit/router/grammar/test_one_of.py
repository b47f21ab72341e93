"""Branches of `oneOf`: what fits two, as JSON Schema reads them, is not written, and what excludes each other is."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer, TokenizerWrapper

from router.grammar.worker import _Bytes, check
from wire.grammar import compile_grammar

TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))
A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
OBJECT = {"type": "object"}
WITHIN = OBJECT | {"required": ["x"]}
CLOSED_ONLY = (
    "the branches of a `oneOf` exclude each other only where objects are closed and have their `type`: say `type`, and "
    "`additionalProperties: false` or `required` keys, or use `anyOf`"
)
OVERLAP = "a `oneOf` whose branches overlap cannot be enforced: use `anyOf`, or branches that exclude each other"
DEFINITIONS = {
    "$defs": {"a": A, "object": A | OBJECT, "text": {"type": "string"}, "a_or_text": {"anyOf": [A, {"type": "string"}]}}
}


@pytest.mark.parametrize(
    ("branches", "sentence"),
    [
        ([A, {"type": "string"}], CLOSED_ONLY),
        ([{"type": ["string", "null"]}, A], CLOSED_ONLY),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/text"}], CLOSED_ONLY),
        ([{"allOf": [A]}, {"enum": [1]}], CLOSED_ONLY),
        ([{"$ref": "#/$defs/a_or_text"}, {"type": "integer"}], CLOSED_ONLY),
        ([A, {"minItems": 2}], OVERLAP),
        # Closing alone tells these apart: by a schema's own reading the second takes what the first does.
        ([A | OBJECT, OBJECT | {"properties": {"b": {"type": "integer"}}}], CLOSED_ONLY),
        ([OBJECT | {"properties": {"b": {}}}, A | OBJECT], CLOSED_ONLY),
        (
            [
                WITHIN | {"properties": {"x": A | OBJECT}},
                WITHIN | {"properties": {"x": OBJECT | {"properties": {"b": {}}}}},
            ],
            CLOSED_ONLY,
        ),
        ([{"allOf": [{"$ref": "#/$defs/object"}]}, OBJECT | {"properties": {"b": {}}}], CLOSED_ONLY),
        ([{"enum": [1, 2]}, {"const": 1.0}], OVERLAP),
        ([{"const": {"a": 1}}, A | OBJECT], OVERLAP),
        ([{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 3}], OVERLAP),
        ([True, {"type": "string"}], OVERLAP),
    ],
)
def test_a_value_that_fits_two_branches_is_not_written(branches: list[Any], sentence: str) -> None:
    for path, schema in (
        ("#/oneOf", {"oneOf": branches}),
        ("#/properties/v/items/oneOf", {"type": "object", "properties": {"v": {"items": {"oneOf": branches}}}}),
    ):
        assert check("json", json.dumps(schema | DEFINITIONS), TOKENIZER)["fault"] == f"{path}: {sentence}"


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("#/properties/a~1b~0c/oneOf", {"properties": {"a/b~c": {"oneOf": [True, True]}}}),
        ("#/$defs/x/allOf/1/oneOf", {"$ref": "#/$defs/x", "$defs": {"x": {"allOf": [{}, {"oneOf": [True, True]}]}}}),
        ("#/anyOf/1/oneOf", {"anyOf": [{"oneOf": [A | OBJECT, {"type": "null"}]}, {"oneOf": [True, True]}]}),
        ("#/prefixItems/1/oneOf", {"prefixItems": [True, {"oneOf": [{}, {}]}]}),
        # Written otherwise before it is compiled.
        ("#/then/oneOf", {"if": {"const": 1}, "then": {"oneOf": [True, True]}}),
        ("#/not/not/oneOf", {"not": {"not": {"oneOf": [True, True]}}}),
        ("#/dependentSchemas/a/oneOf", {"type": "object", "dependentSchemas": {"a": {"oneOf": [True, True]}}}),
        ("#/contains/oneOf", {"type": "array", "contains": {"oneOf": [True, True]}, "allOf": [{"oneOf": [{}]}]}),
        ("#/oneOf/1/oneOf", {"oneOf": [{"type": "null"}, {"type": "integer", "oneOf": [True, True]}]}),
    ],
)
def test_a_refusal_says_where_the_branches_are(path: str, schema: dict[str, Any]) -> None:
    assert check("json", json.dumps(schema), TOKENIZER)["fault"] == f"{path}: {OVERLAP}"


@pytest.mark.parametrize(
    ("branches", "other"),
    [
        ([A | OBJECT, {"type": "string"}], "x"),
        ([A, B], {"b": 1}),
        ([A, B | OBJECT], {"b": 1}),
        ([A, {"allOf": [B | OBJECT]}], {"b": 1}),
        ([A, {"anyOf": [B, B | OBJECT]}], {"b": 1}),
        ([A | OBJECT, OBJECT | {"properties": {"b": {}}, "additionalProperties": False}], {"b": 1}),
        ([{"$ref": "#/$defs/object"}, B | OBJECT], {"b": 1}),
        ([{"$ref": "#/$defs/a_or_text"}, B | OBJECT], {"b": 1}),
        ([A | OBJECT, {"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}], 4),
        ([A | OBJECT, {"const": {"a": "x"}}, {"enum": ["x", "y"]}, {"const": "z"}], "z"),
        ([A | OBJECT, {"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}], "abc"),
    ],
)
def test_objects_may_be_told_by_their_keys(branches: list[Any], other: Any) -> None:
    checked = check("json", json.dumps({"oneOf": branches} | DEFINITIONS), TOKENIZER)
    assert "fault" not in checked, checked
    for value in ({"a": 1}, other):
        matcher = compile_grammar("json", checked["grammar"], TOKENIZER, [256])
        text = json.dumps(value, separators=(",", ":")).encode()
        assert matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting(), value


CAT, DOG = (
    OBJECT | {"properties": {"kind": {"const": kind}, "v": {"$ref": "#/$defs/pet"}}, "required": ["kind"]}
    for kind in ("cat", "dog")
)


def test_models_told_apart_by_a_key_are_served_behind_references() -> None:
    """As pydantic writes unions with a discriminator, here one that refers to itself."""
    pet = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}}
    schema = {"$ref": "#/$defs/pet", "$defs": {"pet": pet, "cat": CAT, "dog": DOG, "unused": {"oneOf": [True, True]}}}
    assert takes(schema, {"kind": "dog", "v": {"kind": "cat"}})
    assert not takes(schema, {"kind": "cow"}) and not takes(schema, {"kind": "cat", "v": {}})


def test_what_stands_beside_the_branches_tells_them_apart() -> None:
    branches = [{"properties": {"kind": {"const": kind}}} for kind in ("cat", "dog")]
    beside = OBJECT | {"required": ["kind"]}
    for schema in (beside | {"oneOf": branches}, {"allOf": [beside, {"oneOf": branches}]}):
        assert takes(schema, {"kind": "cat"}) and not takes(schema, {})
    assert takes(beside | {"oneOf": branches, "anyOf": [{"minProperties": 1}]}, {"kind": "dog"})


@pytest.mark.parametrize(
    "last", [{"allOf": [{"title": "x"}]}, {"not": {"const": 3}}, {"if": {"const": 3}, "then": False}]
)
def test_branches_beside_others_stay(last: dict[str, Any]) -> None:
    """Whatever else is written as a part, and wherever in the schema it is named."""
    schema = {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "null"}], "anyOf": [{"type": ["integer", "null"]}]}
    for whole in (schema | last, last | schema):
        assert takes(whole, 7) and takes(whole, None) and not takes(whole, 4)


def test_branches_that_are_named_elsewhere_are_told_apart_without_what_stands_beside_them() -> None:
    part = {"oneOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}
    beside = {"type": "string", "allOf": [part]}
    assert takes({"properties": {"b": beside}}, {"b": "x"})
    schema = {"properties": {"b": beside, "a": {"$ref": "#/properties/b/allOf/0"}}}
    assert check("json", json.dumps(schema), TOKENIZER)["fault"] == f"#/properties/b/allOf/0/oneOf: {OVERLAP}"


def test_many_models_are_told_apart_by_a_key() -> None:
    models = {
        f"m{number}": OBJECT | {"properties": {"kind": {"const": number}, "v": {}}, "required": ["kind"]}
        for number in range(600)
    }
    schema = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in models], "$defs": models}
    assert takes(schema, {"kind": 599}) and not takes(schema, {"kind": 600})


def test_branches_that_are_too_many_to_compare_are_refused_in_these_words() -> None:
    branches = [{"type": "string", "minLength": 2 * number, "maxLength": 2 * number + 1} for number in range(400)]
    fault = check("json", json.dumps({"oneOf": branches}), TOKENIZER)["fault"]
    assert fault.startswith("#/oneOf: the branches of a `oneOf` are too many to compare: give each a required key"), (
        fault
    )


def test_the_same_reference_in_two_documents_leads_to_two_places() -> None:
    inner = OBJECT | {"$id": "http://x/a", "properties": {"q": {"$ref": "#/definitions/x"}}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"A": inner},
        "definitions": {"x": {"type": "integer"}}, "properties": {"r": {"$ref": "#/definitions/x"}},
    }  # fmt: skip
    fault = check("json", json.dumps(schema), TOKENIZER)["fault"]
    assert fault == "the `$ref` #/definitions/x leads to no schema within this one"


def test_keys_stay_in_the_order_of_the_schema() -> None:
    branches = [OBJECT | {"properties": {"a": {"const": value}}, "required": ["a"]} for value in (1, 2)]
    schema = {"oneOf": branches, "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    assert takes(schema, {"a": 2, "b": 1}) and not takes(schema, {"b": 1, "a": 2})


def test_what_stands_beside_a_reference_says_nothing_in_old_drafts() -> None:
    """There both branches are the same."""
    branches = [{"$ref": "#/definitions/x", "required": ["a"]}, {"$ref": "#/definitions/x", "maxProperties": 0}]
    schema = {"oneOf": branches, "definitions": {"x": OBJECT}}
    assert takes(schema, {"a": 1}) and takes(schema, {})
    old = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema
    assert check("json", json.dumps(old), TOKENIZER)["fault"] == f"#/oneOf: {OVERLAP}"


def takes(schema: Any, value: Any) -> bool:
    checked = check("json", json.dumps(schema), TOKENIZER)
    assert "fault" not in checked, (schema, checked)
    matcher = compile_grammar("json", checked["grammar"], TOKENIZER, [256])
    text = json.dumps(value, separators=(",", ":")).encode()
    return bool(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())


_KEYS = st.sampled_from(["a", "b", "x"])
_LEAVES = st.sampled_from(
    [True, {"type": "integer"}, {"type": "string"}, {"const": 1}, {"const": "t"}, {"enum": [1.0, 2, None]}, {},
     {"type": ["null", "boolean"]}, {"maximum": 1}, {"type": "number", "exclusiveMinimum": 1}, {"maxLength": 1},
     {"type": "array", "maxItems": 1}, {"minItems": 2}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/object"}]
)  # fmt: skip


def _objects(inner: Any) -> Any:
    keywords = {
        "properties": st.dictionaries(_KEYS, inner, max_size=2), "required": st.lists(_KEYS, unique=True, max_size=2),
        "type": st.just("object"), "additionalProperties": st.booleans(), "maxProperties": st.integers(0, 2),
    }  # fmt: skip
    joined = st.lists(inner, min_size=1, max_size=2)
    return (
        st.fixed_dictionaries({}, optional=keywords)
        | st.builds(lambda keyword, parts: {keyword: parts}, st.sampled_from(["oneOf", "anyOf", "allOf"]), joined)
        | st.fixed_dictionaries({"oneOf": joined}, optional=keywords)
    )


_BRANCHES = st.lists(st.recursive(_LEAVES, _objects, max_leaves=8), min_size=2, max_size=3)
# By themselves most overlap.
_TOLD_BY_A_KEY = st.lists(_LEAVES, min_size=2, max_size=3).map(
    lambda branches: [
        OBJECT | {"properties": {"x": {"const": number}, "v": one}, "required": ["x"], "additionalProperties": False}
        for number, one in enumerate(branches)
    ]
)


@pytest.mark.random
def test_what_is_written_fits_one_branch() -> None:
    is_accepted = list[bool]()

    @given(_BRANCHES | _TOLD_BY_A_KEY, st.randoms())
    def fits(branches: list[Any], chance: random.Random) -> None:
        schema = {"oneOf": branches} | DEFINITIONS
        checked = check("json", json.dumps(schema), TOKENIZER)
        is_accepted.append("fault" not in checked)
        if is_accepted[-1]:
            start = compile_grammar("json", checked["grammar"], TOKENIZER, [256])
            judge = jsonschema.Draft202012Validator(schema)
            for _ in range(8):
                if (written := _written(start, chance)) is not None:
                    assert judge.is_valid(json.loads(written)), written

    fits()
    assert sum(is_accepted) > len(is_accepted) // 10, (sum(is_accepted), len(is_accepted))


def _written(start: Any, chance: random.Random) -> bytes | None:
    """Return a random text of a grammar, or None if none ended soon."""
    matcher, written = start.deep_copy(), list[int]()
    for _ in range(64):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        likely = [token for token in b'"{}[]:,1abtx' if mask >> token & 1]
        possible = likely or [token for token in range(256) if mask >> token & 1]
        if matcher.is_accepting() and (not possible or chance.random() < 0.5):
            return bytes(written)
        if not possible:
            return None
        written.append(chance.choice(possible))
        matcher.consume_token(written[-1])
    return None
