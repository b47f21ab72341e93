"""What does not fit a JSON schema, as a schema of keywords that llguidance enforces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

_TYPES = ("null", "boolean", "object", "array", "number", "string")
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
# Keywords of one bound: the type that they are about, and the other side.
_OTHER_SIDE = {
    "minimum": ("number", "exclusiveMaximum", 0), "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
}  # fmt: skip
_LONGEST = 2000
"""Characters of excluded texts in all: the expression that excludes them is longer."""


def negated(schema: Any, depth: int = 8) -> dict[str, Any] | bool | None:
    """Return a schema of what does not fit, which may leave out some of it; None: it cannot be said."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth == 0:
        return None
    found = []
    for keyword in schema.keys() - _NOTES:
        other = _negated_keyword(keyword, schema, depth)
        if other is None:
            return None
        if other is not False:
            found.append(other)
    if True in found:
        return True
    return _any_of(sorted(found, key=str))


def _negated_keyword(keyword: str, schema: dict[str, Any], depth: int) -> dict[str, Any] | bool | None:
    value = schema[keyword]
    if keyword == "type":
        return _of_other_types(value)
    if keyword in ("const", "enum"):
        values = [value] if keyword == "const" else value
        return _unlisted(values, schema.get("type")) if isinstance(values, list) else None
    if keyword == "required":
        return _any_of([_without(name) for name in value]) if _are_names(value) else None
    if keyword == "properties" and isinstance(value, dict):
        return _combined([_other_value(name, inner, depth) for name, inner in value.items()], _any_of)
    if keyword == "anyOf" and isinstance(value, list):
        return _combined([negated(one, depth - 1) for one in value], _all_of)
    if keyword == "allOf" and isinstance(value, list):
        return _combined([negated(one, depth - 1) for one in value], _any_of)
    if keyword == "not":
        return value if isinstance(value, dict | bool) else None
    if keyword in _OTHER_SIDE and isinstance(value, int | float) and not isinstance(value, bool):
        kind, other, step = _OTHER_SIDE[keyword]
        return {"type": kind, other: value + step} if not step or value + step >= 0 else False
    return None


def _combined(parts: Sequence[dict[str, Any] | bool | None], how: Any) -> dict[str, Any] | bool | None:
    known = [part for part in parts if part is not None]
    return how(known) if len(known) == len(parts) else None


def _any_of(parts: Sequence[dict[str, Any] | bool]) -> dict[str, Any] | bool:
    left = [part for part in parts if part is not False]
    if True in left or not left:
        return bool(left)
    return left[0] if len(left) == 1 else {"anyOf": left}


def _all_of(parts: Sequence[dict[str, Any] | bool]) -> dict[str, Any] | bool:
    left = [part for part in parts if part is not True]
    if False in left or not left:
        return not left
    return left[0] if len(left) == 1 else {"allOf": left}


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _without(name: str) -> dict[str, Any]:
    """Return objects that lack a key, and leave others open."""
    return {"type": "object", "properties": {name: False}, "additionalProperties": True}


def _other_value(name: str, schema: Any, depth: int) -> dict[str, Any] | bool | None:
    """Return objects with the key, whose value does not fit."""
    other = negated(schema, depth - 1)
    if other is None or other is False:
        return other
    return {"type": "object", "properties": {name: other}, "required": [name], "additionalProperties": True}


def _of_other_types(said: object) -> dict[str, Any] | bool | None:
    types = [said] if isinstance(said, str) else said
    if not isinstance(types, list) or not set(types) <= set(_TYPES):  # `integer` leaves other numbers
        return None
    others = [kind for kind in _TYPES if kind not in types]
    return {"type": others} if others else False


def _unlisted(values: Sequence[Any], said: object) -> dict[str, Any] | bool | None:
    """Return what is none of the values, of the type beside them if there is one."""
    if any(isinstance(value, dict | list) for value in values):
        return None
    texts = [value for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    truths = {value for value in values if isinstance(value, bool)}
    parts: list[dict[str, Any] | bool] = []
    untouched = [
        kind for kind, touched in (
            ("null", None in values), ("boolean", bool(truths)), ("object", False), ("array", False),
            ("number", bool(numbers)), ("string", bool(texts)),
        ) if not touched
    ]  # fmt: skip
    parts.append({"type": untouched})
    if len(truths) == 1:
        parts.append({"const": not truths.pop()})
    if texts:
        if sum(map(len, texts)) > _LONGEST or any("\0" in text for text in texts):
            return None
        parts.append({"type": "string", "pattern": pattern_of_others(texts)})
    parts += _between(sorted(set(numbers)))
    kept = {"integer": "number"}.get(said, said) if isinstance(said, str) else None
    if kept in untouched:
        return {"type": kept}
    return _any_of([part for part in parts if kept is None or _is_of(part, kept)])


def _is_of(part: dict[str, Any] | bool, kind: object) -> bool:
    if not isinstance(part, dict):
        return part
    if "const" in part:
        return kind == "boolean"
    return kind in part["type"] if isinstance(part["type"], list) else kind == part["type"]


def _between(numbers: Sequence[float]) -> list[dict[str, Any] | bool]:
    """Return the intervals that numbers leave."""
    if not numbers:
        return []
    ends = [None, *numbers, None]
    intervals: list[dict[str, Any] | bool] = []
    for low, high in pairwise(ends):
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        intervals.append({"type": "number"} | {name: bound for name, bound in bounds.items() if bound is not None})
    return intervals


def pattern_of_others(texts: Iterable[str]) -> str:
    """Return an expression of all texts but these."""
    return f"^({_others(set(texts))})$"


def _others(rests: set[str]) -> str:
    """Return what differs from all rests of texts, which begin alike."""
    firsts = sorted({rest[0] for rest in rests if rest})
    choices = [] if "" in rests else [""]
    members = "".join(re.escape(first) if first.isascii() else first for first in firsts)
    choices.append(rf"[^{members}][\s\S]*" if firsts else r"[\s\S]+")
    for first in firsts:
        choices.append(f"{re.escape(first)}({_others({rest[1:] for rest in rests if rest[:1] == first})})")
    return "|".join(choices)
