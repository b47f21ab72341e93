"""Keywords that llguidance would enforce wrongly: nothing invalid can be written, or the schema is refused by name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from router.grammar.closed_schema import close_objects
from router.grammar.exact_schema import enforceable, of_parsed_text
from router.grammar.worker import _Bytes, check
from wire.grammar import OF_CALLS, compile_grammar

TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


def compiled(schema: dict[str, Any]) -> LLMatcher:
    checked = check("json", json.dumps(schema), TOKENIZER)
    assert "fault" not in checked, checked
    return compile_grammar("json", checked["grammar"], TOKENIZER, [256])


def takes(matcher: LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


BOUNDS = (-2, -1.5, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 10, 10.5)
NUMBERS = (
    *map(str, BOUNDS),
    "-0",
    "-1.0",
    "-1.2",
    "-0.6",
    "0.0",
    "0.1",
    "0.6",
    "1.0",
    "1.2",
    "10.0",
    "10.2",
    "11",
    "3",
)


@pytest.mark.parametrize(("low", "high"), list(itertools.combinations(BOUNDS, 2)))
def test_no_number_outside_of_its_bounds_can_be_written(low: float, high: float) -> None:
    for lower, upper in itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        matcher = compiled({"type": "number", lower: low, upper: high})
        found = [Decimal(text) for text in NUMBERS if takes(matcher, text)]
        for value in found:
            assert (value > Decimal(str(low))) or (lower == "minimum" and value == Decimal(str(low))), (
                lower,
                upper,
                value,
            )
            assert (value < Decimal(str(high))) or (upper == "maximum" and value == Decimal(str(high))), (upper, value)
        inside = (Decimal(str(low)) + Decimal(str(high))) / 2
        assert takes(matcher, str(inside)), "what is inside still can be"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"const": "a\0b"}, "`const` has a text with the character NUL"),
        ({"enum": [{"a": ["x\0"]}]}, "`enum` has a text with the character NUL"),
        ({"type": "object", "properties": {"a\0": {}}}, "`properties` has a text with the character NUL"),
        ({"type": "object", "properties": {"a": {"not": {"pattern": "a"}}}}, "`not` cannot be enforced"),
        ({"contains": {}, "uniqueItems": True}, "`contains`, `uniqueItems` cannot be enforced"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "a `oneOf` whose branches overlap"),
        ({"type": "string", "if": {"pattern": "a"}, "then": {"maxLength": 3}}, "`if`, `then` cannot be enforced"),
        ({"prefixItems": [{"type": "integer"}], "additionalItems": False}, "`prefixItems` beside `additionalItems`"),
        ({"prefixItems": [{"type": "integer"}], "items": [{}]}, "beside a list in `items`, cannot be enforced"),
    ],
)
def test_what_cannot_be_enforced_is_refused_in_the_clients_words(schema: dict[str, Any], said: str) -> None:
    fault = check("json", json.dumps(schema), TOKENIZER)["fault"]
    assert said in fault and "Unimplemented" not in fault and "coerce" not in fault


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2.0, "uniqueItems": False}, "[1,1]", "[1,1,1]"),
        ({"type": "object", "unevaluatedProperties": True, "propertyNames": {}}, '{"a":1}', "1"),
        ({"type": "string", "minLength": 1.0, "if": {"minLength": 2}}, '"a"', '""'),
        ({"type": "array", "minContains": 2, "unevaluatedItems": {}}, "[]", "1"),
        ({"type": "array", "items": {"type": "integer"}, "additionalItems": False}, "[1,2]", '["a"]'),
        ({"type": "array", "additionalItems": {"type": "string"}}, "[1]", "1"),
    ],
)
def test_what_says_nothing_is_left_out(schema: dict[str, Any], taken: str, refused: str) -> None:
    matcher = compiled(schema)
    assert takes(matcher, taken) and not takes(matcher, refused)


@pytest.mark.parametrize("lower", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("upper", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize(("low", "high"), [(0, 0.5), (-1.5, -1), (1, 1.5), (-0.5, 0), (0, 10)])
def test_bounds_count_wherever_the_parts_of_a_schema_have_them(lower: str, upper: str, low: float, high: float) -> None:
    one, other = {lower: low}, {upper: high}
    wholes: list[dict[str, Any]] = [
        {"type": "number", "allOf": [one, other]},
        {"allOf": [{"type": "number"} | one, {"type": "number"} | other]},
        {"type": "number", **one, "allOf": [other]},
        {"type": "number", **other, "anyOf": [one, {"const": 7}]},
        {"$defs": {"a": {"type": "number", **one}}, "$ref": "#/$defs/a", **other},
        {"type": "object", "properties": {"v": {"type": "number", "allOf": [{"allOf": [one]}, other]}}},
    ]
    for schema in wholes:
        matcher = compile_grammar("json", json.dumps(close_objects(schema)), TOKENIZER, [256])
        form = '{"v":%s}' if "properties" in schema else "%s"
        taken = [text for text in NUMBERS if takes(matcher, form % text)]
        for value in map(Decimal, taken):
            assert value > Decimal(str(low)) or (lower == "minimum" and value == Decimal(str(low))), schema
            assert value < Decimal(str(high)) or (upper == "maximum" and value == Decimal(str(high))), schema
        assert takes(matcher, form % str((Decimal(str(low)) + Decimal(str(high))) / 2)), schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": True},
    ],
)
def test_a_key_has_one_spelling(schema: dict[str, Any]) -> None:
    matcher = compiled(schema)
    assert takes(matcher, '{"a":1}') and takes(matcher, '{"b":"x"}')
    for key in (r"\u0061", "a"):
        assert not takes(matcher, f'{{"{key}":"x"}}')
    assert takes(matcher, r'{"b":"é\n\"\\"}'), "every other character can be written as itself"
    calls = LLMatcher.grammar_from_json_schema(json.dumps(schema | {"x-guidance": OF_CALLS}))
    matcher = LLMatcher(TOKENIZER, calls)
    assert takes(matcher, '{"a": 1}') and not takes(matcher, r'{"\u0061": "x"}')


PATTERNS = (
    r'^[^"]*$', r"^[^\\]*$", r'^[^"\\]+$', r'^[^a"]$', r"^[^!-#]*$", r'^[^]"]*$', r"^[^a]*$", r'^x[^ "]y?$',
    r'^(?:[^"]|")$', r"^[\]^]*$", r'^\[[^"]$',
)  # fmt: skip
TEXTS = ('"', "\\", 'a"', "a", "x", "]", "^", 'x"', "xa", "[a", '["', "", "é", "#")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_about_the_parsed_text(pattern: str) -> None:
    matcher = compiled({"type": "string", "pattern": pattern})
    python = pattern.replace("[^]", r"[^\]")
    for text in TEXTS:
        assert takes(matcher, json.dumps(text, ensure_ascii=False)) == bool(re.search(python, text)), text
    if not pattern.startswith("^x"):
        key = compiled({"type": "object", "patternProperties": {pattern: {"type": "integer"}}})
        assert not takes(key, '{"\\"":"x"}') or not re.search(python, '"')


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"^[^[]$", "a]", "["), (r"^[[a]$", "[a", "b"), (r"^[^[\]]*$", ["", "ab"], "[]"),
        (r"^\[[^[\]]*\]$", ["[a]"], ["[[]"]),
        (r"^[a&&b]$", "a&b", "c"), (r"^[^a&&b]$", "c", "a&b"), (r"^[^~~]$", "a", "~"),
        (r"^[a-z&&[^b]]$", ["a]"], "ab&"),
        (r"^[+--]$", "+,-", "."), (r"^[^+--]$", ".", "+,-"), (r"^[--a]$", "-.0a", ",b"), (r"^[^--a]$", ",b", "-.0a"),
        (r"^\s$", " \t\n\xa0\ufeff", "a\x85"), (r"^\S$", 'a"\\\x85', " \n\ufeff"), (r"^[^\s]$", 'a"', " \ufeff"),
        (r"^[\s\S]$", '\na"', ""), (r"^.$", 'a."', "\n\r\u2028"), (r"^[.]$", ".", "a"), (r"(?s)^.$", "a\n", ""),
        (r"^[\u0000-\u001f]$", "\n\t", '"\\a'), (r"^[\x00-!]$", "! \n", '"\\a'), (r"^[^\x00-\x1f]$", 'a"\\', "\n"),
        (r"^\p{Cc}$", "\n", '"\\a'), (r"^[\p{Cc}a]$", "\na", '"\\b'), (r"^[\p{L}-]$", "é-", "0"),
    ],
)  # fmt: skip
def test_a_pattern_has_the_meaning_of_json_schema(pattern: str, matching: Iterable[str], others: Iterable[str]) -> None:
    matcher = compiled({"type": "string", "pattern": pattern})
    for expected, texts in ((True, matching), (False, others)):
        for text in texts:
            assert takes(matcher, json.dumps(text, ensure_ascii=False)) == expected, text


def test_negated_properties_too() -> None:
    assert of_parsed_text(r"\P{Po}\PL\\P") == r"[^\x00\p{Po}][^\x00\pL]\\P"
    matcher = compiled({"type": "string", "pattern": r"^\P{Po}$"})
    assert takes(matcher, '"a"') and not takes(matcher, r'"\""') and not takes(matcher, r'"\\"')


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"const": 2**53 + 1}, "const"), ({"enum": [1, [2**60]]}, "enum"), ({"const": {"a": -(2**60)}}, "const"),
        ({"type": "integer", "minimum": 2**60}, "minimum"), ({"type": "number", "maximum": -1e20}, "maximum"),
        ({"type": "integer", "multipleOf": 2**60}, "multipleOf"),
        ({"type": "object", "properties": {"a": {"items": {"const": 2**53 + 1}}}}, "const"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-7}, "exclusiveMinimum"),
    ],
)  # fmt: skip
def test_numbers_that_are_not_exact_are_refused_by_name(schema: dict[str, Any], keyword: str) -> None:
    assert f"`{keyword}`" in check("json", json.dumps(schema), TOKENIZER)["fault"]


def test_bounds_of_64_bits_are_served_as_far_as_numbers_are_exact() -> None:
    matcher = compiled({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    assert takes(matcher, "7") and takes(matcher, str(2**53)) and not takes(matcher, str(2**63))
    matcher = compiled({"type": "number", "exclusiveMinimum": -1.7e308, "exclusiveMaximum": 1.7e308})
    assert takes(matcher, "0.5")


def test_what_is_exact_stays() -> None:
    for schema in (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 2**53},
        {"const": 1e15, "enum": [0.5, True, None, "x"]},
        {"minimum": True, "pattern": 3, "patternProperties": 4},
    ):
        assert enforceable(schema) == {**schema}
