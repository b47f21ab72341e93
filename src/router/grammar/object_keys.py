"""Keywords about an object's keys, written with those that llguidance enforces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import regex

from router.grammar.exact_schema import of_parsed_text
from wire.text.patterns import calls_itself

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$anchor", "$dynamicAnchor"}
)  # fmt: skip
_IDENTITY = frozenset({"$schema", "$id", "id"})
_OTHER_PARTS = ("patternProperties", "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "unevaluatedProperties")
_LONGEST = 10_000
_MOST_REFERENCES = 16
# Nothing interrupts reading a pattern, which takes longer than its length says.
_LONGEST_PATTERN = 1_000
# Of processor time, for all patterns and keys of a request: each takes microseconds, or backtracks without end. What
# other threads take while one is compared may count too.
_COMPARED_S = 0.5


class KeyPatterns:
    """Compares keys with patterns of one request."""

    def __init__(self) -> None:
        self._left_s = _COMPARED_S
        self._compiled: dict[str, Any] = {}

    def matching(self, keys: Iterable[str], pattern: str) -> set[str]:
        """Return those that match, while other threads run on."""
        if len(pattern) > _LONGEST_PATTERN:
            raise ValueError(f"the `pattern` of `propertyNames` is longer than {_LONGEST_PATTERN:,} characters")
        try:
            if pattern not in self._compiled:
                self._compiled[pattern] = self._timed(lambda _: _read(pattern))
            return {key for key in keys if self._timed(partial(_found, self._compiled[pattern], key))}
        except TimeoutError:
            raise ValueError("the `pattern` of `propertyNames` takes too long to compare with `properties`") from None
        except (regex.error, RecursionError, OverflowError, MemoryError):
            raise ValueError("the `pattern` of `propertyNames` cannot be compared with `properties`") from None

    def _timed(self, work: Callable[[float], Any]) -> Any:
        """Do something that may take what is left of the time."""
        if self._left_s <= 0:
            raise TimeoutError
        began = time.thread_time()
        try:
            return work(self._left_s)
        finally:
            self._left_s -= time.thread_time() - began


def _found(compiled: Any, key: str, left_s: float) -> bool:
    return compiled.search(key, timeout=left_s, concurrent=True) is not None


def _read(pattern: str) -> Any:
    if calls_itself(pattern):
        raise regex.error("recursion")
    return regex.compile(pattern, cache_pattern=False)


def with_plain_keys(
    schema: dict[str, Any],
    named: Callable[[dict[str, Any]], Any],
    *,
    is_merged: bool,
    patterns: KeyPatterns,
    write: Callable[[str], str] = of_parsed_text,
) -> dict[str, Any]:
    """Replace `propertyNames` and `dependentRequired` of a closed schema, whose number of keys can be enforced.

    Args:
        named: Returns what a schema's `$ref` names; if that is not known, False.
        write: Makes a pattern of names one of `patternProperties`.
        is_merged: Whether the object has other parts.

    Raises:
        ValueError: What they say cannot be enforced.
    """
    if isinstance(needed := schema.get("dependentRequired"), dict):
        schema = _with_needed(schema, needed)
    if "propertyNames" in schema:
        if is_merged or any(keyword in schema for keyword in _OTHER_PARTS):
            raise ValueError("`propertyNames` beside other parts of an object cannot be enforced")
        schema = _with_names(schema, named, write, patterns)
    _check_number(schema)
    return schema


def _check_number(schema: dict[str, Any]) -> None:
    """Refuse a number of keys that repeated ones would reach: only named ones come once."""
    least, kinds, required = schema.get("minProperties"), schema.get("type", "object"), schema.get("required")
    is_listed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if is_listed or not isinstance(least, int) or "object" not in kinds or not {"const", "enum"}.isdisjoint(schema):
        return
    if least > 1 + (len(required) if isinstance(required, list) else 0):
        text = "one key more than `required` has can be demanded; name the others in `properties` and `required`"
        raise ValueError(f"`minProperties` {least} cannot be enforced: {text}")


def _with_needed(schema: dict[str, Any], needed: dict[str, Any]) -> dict[str, Any]:
    """Let each of the keys be absent, or the others be there."""
    others = schema.get("allOf", [])
    if not isinstance(others, list) or not all(isinstance(names, list) for names in needed.values()):
        raise ValueError("`allOf` must be a list, and `dependentRequired` have one for each key")
    choices = [
        {"anyOf": [{"properties": {key: False}}, {"required": [key, *names]}]} for key, names in needed.items() if names
    ]
    rest = {keyword: value for keyword, value in schema.items() if keyword != "dependentRequired"}
    return rest | {"allOf": [*others, *choices]} if choices else rest


def _with_names(
    schema: dict[str, Any], named: Callable[[dict[str, Any]], Any], write: Callable[[str], str], patterns: KeyPatterns
) -> dict[str, Any]:
    names = _resolved(schema["propertyNames"], named)
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    rest = {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
    closed = {"additionalProperties": False}
    if not isinstance(properties, dict):
        raise ValueError("`properties` must be an object")
    if names is False:
        return rest | closed | {"properties": dict.fromkeys(properties, False)}
    listed = _listed(names)
    if listed is not None:
        described = {key: value if key in listed else False for key, value in properties.items()}
        more = {} if others is False else {key: others for key in listed if key not in properties}
        return rest | closed | {"properties": described | more}
    pattern = _pattern(names)
    fitting = patterns.matching(properties, pattern) if properties else set()
    described = {key: value if key in fitting else False for key, value in properties.items()}
    if others is False:
        return rest | {"properties": described}
    if others not in (True, {}) and any(value is not False for value in described.values()):
        raise ValueError("`propertyNames` beside `properties` and `additionalProperties` cannot be enforced")
    return rest | closed | {"properties": described, "patternProperties": {write(pattern): others}}


def _resolved(names: Any, named: Callable[[dict[str, Any]], Any]) -> Any:
    for _ in range(_MOST_REFERENCES):
        if not isinstance(names, dict) or not isinstance(names.get("$ref"), str):
            return names
        if names.keys() - _NOTES != {"$ref"}:
            raise ValueError(_refusal(names))
        names = named(names)
    raise ValueError("the `$ref` of `propertyNames` leads to no end of others")


def _listed(names: Any) -> list[str] | None:
    """Return the keys, if they are listed."""
    if not isinstance(names, dict) or not names.keys() & {"enum", "const"}:
        return None
    choices = [names["const"]] if "const" in names else names["enum"]
    if _said(names) > {"enum"} or not isinstance(choices, list) or not _is_text(names):
        raise ValueError(_refusal(names))
    return [one for one in choices if isinstance(one, str)]


def _pattern(names: Any) -> str:
    """Return what keys match, as a regular expression."""
    if not isinstance(names, dict) or not _is_text(names):
        raise ValueError("`propertyNames` must be a schema of texts")
    said = _said(names)
    if said == {"pattern"} and isinstance(pattern := names["pattern"], str):
        return pattern
    least, most = names.get("minLength", 0), names.get("maxLength")
    if said <= {"minLength", "maxLength"} and all(_is_length(one) for one in (least, 0 if most is None else most)):
        return rf"^[\s\S]{{{int(least)},{'' if most is None else int(most)}}}$"
    raise ValueError(_refusal(names))


def _said(names: dict[str, Any]) -> set[str]:
    return names.keys() - _NOTES - _IDENTITY - {"type"}


def _is_text(names: dict[str, Any]) -> bool:
    return bool(names.get("type", "string") == "string")


def _is_length(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= _LONGEST and value == int(value)


def _refusal(names: dict[str, Any]) -> str:
    said = ", ".join(f"`{keyword}`" for keyword in sorted(names))
    return f"`propertyNames` with {said} cannot be enforced: only `enum`, `pattern`, or lengths can"
