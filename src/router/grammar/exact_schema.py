"""JSON schema keywords as llguidance enforces them exactly, at most narrower, or refused by name."""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

from router.grammar.conditions import WORDS

_LARGEST = 2**53
"""From here on whole numbers have no exact double, which is what llguidance compares."""
_STEP = 1e-6
_LOWER, _UPPER = "exclusiveMinimum", "exclusiveMaximum"
_MOST, _LEAST = ("maximum", _UPPER), ("minimum", _LOWER)
_BOUNDS = frozenset({*_MOST, *_LEAST})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_NEUTRAL = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True, "propertyNames": True}
_NEEDED = {
    "minContains": ("contains",), "maxContains": ("contains",), "then": ("if",), "else": ("if",),
    "if": ("then", "else"),
}  # fmt: skip
"""Keywords that say nothing without one of these."""
_JOINING = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf"})
_PARTS_OF_PATTERNS = re.compile(r"\\([pP])(\{[^}]*\}|[A-Z])|\\.|\[\^?\]?|&&|~~|--|.", re.DOTALL)
"""Properties, escaped characters, where a class begins, with a bracket that is its first member, and what may have
another meaning in Rust."""
_NUL = re.compile(r"\\(x00|u0000|[xu]\{0+\})|\0")
_ANY_CHARACTER = re.compile(r"\(\?[a-z]*s")
"""Flags by which a dot is also the end of a line."""
_SPACES = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_OF_SCHEMAS = {r"\s": f"[{_SPACES}]", r"\S": rf"[^\x00{_SPACES}]"}
_WITHIN_CLASSES = {"[": r"\[", "[^": r"\[^", "[]": r"\[]", "[^]": r"\[^]", "&&": r"\&\&", "~~": r"\~\~", "--": r"-\-"}
"""What nests or combines classes in Rust, and is a member in a JSON schema."""


def joins_bounds(value: Any) -> bool:
    """Say whether a number may have its bounds in several places of a JSON schema."""
    if isinstance(value, list):
        return any(joins_bounds(one) for one in value)
    if not isinstance(value, dict):
        return False
    all_of = value.get("allOf")
    has_several = isinstance(all_of, list) and len(all_of) > 1
    return has_several or not WORDS.isdisjoint(value) or (
        not _JOINING.isdisjoint(value) and not _BOUNDS.isdisjoint(value)
    ) or any(joins_bounds(one) for one in value.values())  # fmt: skip


def enforceable(schema: dict[str, Any], *, is_part: bool = False) -> dict[str, Any]:
    """Return a schema without nested ones, with exact numbers.

    Args:
        is_part: Whether the other bounds of a number may be elsewhere.

    Raises:
        ValueError: A number cannot be exact.
    """
    if "prefixItems" in schema and ("additionalItems" in schema or isinstance(schema.get("items"), list)):
        raise ValueError("`prefixItems` beside `additionalItems`, or beside a list in `items`, cannot be enforced")
    changed = {name: _whole(name, value) for name, value in schema.items() if not _says_nothing(name, value, schema)}
    for keyword in ("const", "enum"):
        if keyword in schema:
            _check_values(schema[keyword], keyword)
    if isinstance(schema.get("properties"), dict):
        _check_values(list(schema["properties"]), "properties")
    if isinstance(pattern := schema.get("pattern"), str):
        changed["pattern"] = of_parsed_text(pattern)
    if isinstance(properties := schema.get("patternProperties"), dict):
        changed["patternProperties"] = {of_parsed_text(name): value for name, value in properties.items()}
    return _within_exact_numbers(_without_excluded_end(changed, is_part=is_part))


def of_parsed_text(pattern: str) -> str:
    """Write a JSON schema's pattern for llguidance, about the parsed text."""
    # llguidance compares what a class excludes with the characters as they are written, unless it excludes NUL too,
    # which cannot be written anyway.
    written, begin = [], None
    dot = "." if _ANY_CHARACTER.search(pattern) else r"[^\x00\n\r\u2028\u2029]"
    for found in _PARTS_OF_PATTERNS.finditer(pattern):
        part, (kind, name) = found[0], found.groups()
        if kind is not None:
            written.append(rf"[^\x00\p{name}]" if kind == "P" else rf"[\p{name}&&[^\x00]]")
        elif part[0] == "\\":
            written.append(_OF_SCHEMAS.get(part, part))
        elif begin is None and part[0] == "[":
            begin = len(written)
            written += [r"[^\x00" if part[1:2] == "^" else "[", r"\]" if part[-1] == "]" else ""]
        elif begin is None:
            written.append(dot if part == "." else part)
        else:
            is_first = len(written) == begin + 2 and not written[-1]
            written.append(r"\--" if is_first and part == "--" else _WITHIN_CLASSES.get(part, part))
            if part[-1] == "]":
                if written[begin] == "[" and _NUL.search("".join(written[begin:])):
                    written[begin], written[-1] = "[[", rf"{written[-1]}&&[^\x00]]"
                begin = None
    return "".join(written)


def _says_nothing(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
    """Say whether a keyword excludes nothing, at this value or without another one."""
    if keyword in _NEUTRAL:
        return value is _NEUTRAL[keyword] or (value == {} and _NEUTRAL[keyword])
    if keyword == "additionalItems":
        return not isinstance(schema.get("items"), list)
    needed = _NEEDED.get(keyword)
    return needed is not None and schema.keys().isdisjoint(needed)


def _whole(keyword: str, value: Any) -> Any:
    return int(value) if keyword in _COUNTS and isinstance(value, float) and value.is_integer() else value


def _check_values(value: Any, keyword: str) -> None:
    if isinstance(value, list):
        for one in value:
            _check_values(one, keyword)
    elif isinstance(value, dict):
        _check_values([*value, *value.values()], keyword)
    elif isinstance(value, str) and "\0" in value:
        raise ValueError(f"`{keyword}` has a text with the character NUL, which cannot be written")
    elif is_number(value) and abs(value) > _LARGEST and float(value).is_integer():
        raise ValueError(f"`{keyword}` has the number {value}: whole numbers are exact up to 2^53 only; use a string")


def _without_excluded_end(schema: dict[str, Any], *, is_part: bool) -> dict[str, Any]:
    """Replace excluded whole ends that llguidance lets through within one unit."""
    if schema.get("type") == "integer":
        return schema
    for end, others, step in ((_LOWER, _MOST, _STEP), (_UPPER, _LEAST, -_STEP)):
        excluded = schema.get(end)
        if not is_number(excluded) or excluded != math.trunc(excluded) or abs(excluded) >= _LARGEST:
            continue
        near = [schema[name] for name in others if _is_within(schema.get(name), excluded)]
        if not near and not is_part:
            continue
        for bound in near:
            if abs(bound - excluded) <= _STEP:
                raise ValueError(f"`{end}` {excluded} and {bound} as the other end are too close to each other")
        inclusive = "minimum" if end == _LOWER else "maximum"
        nearest, given = _beside(excluded, step), schema.get(inclusive)
        kept = nearest if not is_number(given) else max(given, nearest) if step > 0 else min(given, nearest)
        schema = {name: value for name, value in schema.items() if name != end} | {inclusive: kept}
    return schema


def _is_within(bound: Any, excluded: float) -> bool:
    """Say whether a bound is in the unit that begins with this whole number."""
    return is_number(bound) and bound != excluded and math.isfinite(bound) and math.trunc(bound) == excluded


def _beside(excluded: float, step: float) -> float:
    return excluded + step if excluded + step != excluded else math.nextafter(excluded, math.copysign(math.inf, step))


def _within_exact_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Bound numbers to exact ones; generators write 64-bit bounds."""
    changed = dict(schema)
    for keyword, limit in (*((one, _LARGEST) for one in _MOST), *((one, -_LARGEST) for one in _LEAST)):
        bound = schema.get(keyword)
        if is_number(bound) and abs(bound) > _LARGEST:
            if (bound > 0) != (limit > 0):
                raise ValueError(f"`{keyword}` {bound}: whole numbers are exact up to 2^53 only")
            changed[keyword] = limit
    if is_number(factor := schema.get("multipleOf")) and factor > _LARGEST:
        raise ValueError(f"`multipleOf` {factor}: whole numbers are exact up to 2^53 only")
    return changed


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
