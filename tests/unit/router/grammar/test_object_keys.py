"""Keywords about an object's keys: what can be written under them is what they say."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from typing import Any

import jsonschema
import orjson
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from router.grammar.closed_schema import close_objects
from router.grammar.object_keys import KeyPatterns
from router.grammar.worker import _Bytes, check
from wire.grammar import compile_grammar

TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))
ANY = {"type": "object"}
OPEN = ANY | {"additionalProperties": True}
NAMED = {"a": {"type": "integer"}, "ab": {"type": "integer"}, "c": {}}
KEYS = ("", "a", "ab", "abc", "c", 'é"')
OBJECTS = [dict.fromkeys(keys, 1) for number in range(4) for keys in itertools.combinations(KEYS, number)]


def takes(start: LLMatcher, value: Any) -> bool:
    text, matcher = list(orjson.dumps(value)), start.deep_copy()
    return matcher.validate_tokens(text) == len(text) and matcher.consume_tokens(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        ANY | {"propertyNames": {"enum": ["a", "c", 3]}},
        ANY | {"propertyNames": {"enum": ["c", "a"], "type": "string"}, "additionalProperties": {"type": "integer"}},
        ANY | {"propertyNames": {"const": "a"}, "minProperties": 1},
        ANY | {"propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"enum": ["a", "ab"], "title": "K"}}},
        ANY | {"propertyNames": {"$ref": "#k"}, "$defs": {"k": {"enum": ["a", "ab"], "$anchor": "k"}}},
        ANY
        | {"additionalProperties": {"propertyNames": {"$ref": "#k"}}, "$defs": {"k": {"enum": ["a"], "$anchor": "k"}}},
        ANY
        | {
            "propertyNames": {"$ref": "#k"},
            "minProperties": 1,
            "$defs": {"k": {"$ref": "#l", "$dynamicAnchor": "k"}, "l": {"enum": ["a"], "$dynamicAnchor": "l"}},
        },
        ANY | {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
        ANY | {"propertyNames": {"pattern": '^[^"]*$'}},
        ANY | {"propertyNames": {"maxLength": 2}},
        ANY | {"propertyNames": {"minLength": 1.0, "maxLength": 2, "type": "string"}, "maxProperties": 1},
        ANY | {"propertyNames": False},
        {"propertyNames": {"enum": ["a"]}, "type": ["object", "integer"]},
        OPEN | {"properties": NAMED, "propertyNames": {"pattern": "^a"}},
        OPEN | {"properties": NAMED, "propertyNames": {"enum": ["a", "abc"]}, "required": ["a"]},
        OPEN | {"properties": NAMED, "dependentRequired": {"a": ["ab"]}},
        OPEN | {"properties": NAMED, "dependentRequired": {"a": ["ab", "c"], "c": ["a"], "ab": []}},
        OPEN | {"properties": NAMED, "dependentRequired": {"a": ["c"]}, "propertyNames": {"maxLength": 1}},
        ANY | {"dependentRequired": {"abc": ["c"]}},
        ANY | {"items": 3, "additionalProperties": {"propertyNames": {"enum": ["a"]}}},
        OPEN | {"properties": NAMED, "allOf": [{"required": ["a"]}], "dependentRequired": {"a": ["c"]}},
    ],
)
def test_objects_that_can_be_written_are_those_that_fit(schema: dict[str, Any]) -> None:
    if "propertyNames" in schema and "dependentRequired" in schema:
        assert "beside other parts" in check("json", json.dumps(schema), TOKENIZER)["fault"]
        return
    assert "fault" not in check("json", json.dumps(schema), TOKENIZER)
    start = compile_grammar("json", orjson.dumps(close_objects(schema)).decode(), TOKENIZER, [256])
    for value in [*OBJECTS, {"a": {"a": 1}}, {"a": {"c": 1}}, {"a": "x"}]:
        # The order of keys is the schema's.
        can_come = any(takes(start, dict(pairs)) for pairs in itertools.permutations(value.items()))
        assert can_come == jsonschema.Draft202012Validator(schema).is_valid(value), value


def test_names_are_those_of_the_document_they_are_in() -> None:
    inner = {"$id": "https://example.com/in", "$defs": {"k": {"$ref": "#/$defs/e"}, "e": {"const": "in"}}}
    names = {"$ref": "https://example.com/in#/$defs/k"}
    schema = ANY | {"propertyNames": names, "$defs": {"e": {"const": "out"}, "inner": inner}}
    start = compile_grammar("json", orjson.dumps(close_objects(schema)).decode(), TOKENIZER, [256])
    assert takes(start, {"in": 1}) and not takes(start, {"out": 1})


def test_objects_with_properties_stay_closed() -> None:
    schema = ANY | {"properties": NAMED, "propertyNames": {"enum": ["a", "abc"]}}
    closed = {"a": NAMED["a"], "ab": False, "c": False}
    assert close_objects(schema) == ANY | {"properties": closed, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        ANY | {"propertyNames": {"pattern": "^a", "maxLength": 3}},
        ANY | {"propertyNames": {"enum": ["a"], "pattern": "^a"}},
        ANY | {"propertyNames": {"format": "uuid"}},
        ANY | {"propertyNames": {"type": "integer"}},
        ANY | {"propertyNames": {"not": {"const": "a"}}},
        ANY | {"propertyNames": {"$ref": "#/propertyNames"}},
        ANY | {"propertyNames": {"$ref": "#/$defs/k", "enum": ["a"]}, "$defs": {"k": {"enum": ["a", "b"]}}},
        ANY | {"propertyNames": {"maxLength": 10**9}},
        ANY | {"propertyNames": 3},
        ANY | {"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": {}}},
        ANY | {"allOf": [{"propertyNames": {"enum": ["a"]}}, {"properties": NAMED}]},
        OPEN | {"properties": NAMED, "propertyNames": {"pattern": "^(?<x"}},
        ANY | {"properties": NAMED, "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "string"}},
        ANY | {"dependentRequired": {"a": 3}},
        ANY | {"allOf": 3, "dependentRequired": {"a": ["b"]}},
    ],
)
def test_what_is_not_exact_is_refused_by_name(schema: dict[str, Any]) -> None:
    fault = check("json", json.dumps(schema), TOKENIZER)["fault"]
    assert "`propertyNames`" in fault or "`dependentRequired`" in fault


@pytest.mark.parametrize("reference", ["#/$defs/none", "#none", "https://example.com/none"])
def test_names_that_are_nowhere_are_refused(reference: str) -> None:
    for names in ({"$ref": reference}, {"$ref": "#/$defs/k"}):
        schema = ANY | {"propertyNames": names, "$defs": {"k": {"$ref": reference}}}
        fault = check("json", json.dumps(schema), TOKENIZER)["fault"]
        assert fault == f"the `$ref` {reference} leads to no schema within this one"


@pytest.mark.parametrize(
    "schema",
    [
        ANY | {"minProperties": 2},
        ANY | {"minProperties": 2.0, "additionalProperties": {"type": "integer"}},
        ANY | {"minProperties": 3, "required": ["a"]},
        ANY | {"minProperties": 2, "patternProperties": {"^a": {}}, "additionalProperties": False},
        ANY | {"minProperties": 2, "propertyNames": {"maxLength": 2}},
        ANY | {"allOf": [{"properties": NAMED}, {"minProperties": 2}]},
        {"minProperties": 2},
        {"anyOf": [{"type": "string"}, {"type": ["object", "null"], "minProperties": 2}]},
    ],
)
def test_a_number_of_keys_that_repeated_ones_would_reach_is_refused(schema: dict[str, Any]) -> None:
    assert "`minProperties` " in check("json", json.dumps(schema), TOKENIZER)["fault"]


@pytest.mark.parametrize(
    "schema",
    [
        ANY | {"minProperties": 1},
        ANY | {"minProperties": 2, "required": ["a"]},
        OPEN | {"minProperties": 3, "properties": {"a": {}, "c": {}}, "required": ["a", "c"]},
        ANY | {"minProperties": 2, "properties": {"a": {}, "c": {}}, "required": ["a", "c"]},
        {"minProperties": 2, "enum": [{"a": 1}, {"a": 1, "ab": 1}]},
    ],
)
def test_any_other_number_of_keys_counts_each_once(schema: dict[str, Any]) -> None:
    assert "fault" not in check("json", json.dumps(schema), TOKENIZER)
    start = compile_grammar("json", orjson.dumps(close_objects(schema)).decode(), TOKENIZER, [256])
    validator = jsonschema.Draft202012Validator(schema)
    assert any(takes(start, value) for value in OBJECTS if validator.is_valid(value))
    assert not any(takes(start, value) for value in OBJECTS if not validator.is_valid(value))
    repeated = list(b'{"a":1,"a":2}')
    assert start.validate_tokens(repeated) < len(repeated) or schema["minProperties"] == 1


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("^(a|a)*$", "takes too long to compare"),
        ("^(a|aa)+$", "takes too long to compare"),
        ("(?R)", "cannot be compared"),
        (r"\\\\(?:a(?1))", "cannot be compared"),
        ("(?P<n>a(?&n))", "cannot be compared"),
        ("[", "cannot be compared"),
        ("(" * 900, "cannot be compared"),
        ("a" * 2_000, "longer than 1,000 characters"),
        ("(?x)(?R )", "cannot be compared"),
    ],
)
def test_patterns_that_cost_too_much_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        KeyPatterns().matching(["a" * 60 + "!" + "x" * 60], pattern)


def test_other_threads_run_while_a_pattern_backtracks() -> None:
    turns, has_ended = 0, threading.Event()

    def compare() -> None:
        with pytest.raises(ValueError, match="takes too long"):
            KeyPatterns().matching(["a" * 60 + "!"], "^(a|a)*$")
        has_ended.set()

    thread = threading.Thread(target=compare)
    thread.start()
    while not has_ended.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


def test_what_patterns_match() -> None:
    keys = ["a", "ab", "b", "(1"]
    assert KeyPatterns().matching(keys, "^a") == {"a", "ab"}
    assert KeyPatterns().matching(keys, r"^\(?1") == {"(1"}
    assert KeyPatterns().matching([], "^a") == set()


def test_a_pattern_is_read_once_and_in_the_time_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that many parts of a schema name; and many that take long to read."""
    read: list[str] = []

    def slow(pattern: str, **_: bool) -> re.Pattern[str]:
        read.append(pattern)
        end = time.thread_time() + 0.06
        while time.thread_time() < end:
            pass
        return re.compile(pattern)

    monkeypatch.setattr("router.grammar.object_keys.regex.compile", slow)
    patterns = KeyPatterns()
    for _ in range(64):
        patterns.matching([], "^a")
    assert read == ["^a"]
    with pytest.raises(ValueError, match="takes too long to compare"):
        for number in range(64):
            patterns.matching([], f"^{number}")
    assert len(read) < 12
