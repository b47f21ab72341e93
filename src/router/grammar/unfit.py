"""Whether a value can fit several JSON schemas at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.grammar.exact_schema import is_number

_KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})
_CHOICES = ("anyOf", "oneOf")
# Kind -> the keywords of its least and its most, with whether the end itself is excluded.
_ENDS = {
    "number": ((("minimum", False), ("exclusiveMinimum", True)), (("maximum", False), ("exclusiveMaximum", True))),
    "string": ((("minLength", False),), (("maxLength", False),)),
    "array": ((("minItems", False),), (("maxItems", False),)),
    "object": ((("minProperties", False),), (("maxProperties", False),)),
}
_STEPS = 50_000
_DEPTH = 32
_DEPTH_OF_LOOPS = 100


@dataclass
class Joint:
    """Schemas that a value fits together; what is not understood of them counts as absent."""

    # What a schema's `$ref` leads to; None: the schema has none.
    target: Callable[[dict[str, Any]], Any]
    # Whether nothing beside a `$ref` counts.
    is_alone: bool = False
    # Whether a value has an end: what is asked again on the way to its own answer fits nothing.
    has_end: bool = False
    # Of all questions together.
    num_left: int = field(default=_STEPS, init=False)
    # The texts of a list of values, by its identity, and the list.
    _texts: dict[int, tuple[frozenset[str], list[Any]]] = field(default_factory=dict, init=False)
    # Of `has_end`: what is being asked, and what some value fits, by the identities of the schemas.
    _asked: set[frozenset[int]] = field(default_factory=set, init=False)
    _fitted: set[frozenset[int]] = field(default_factory=set, init=False)

    @property
    def is_tired(self) -> bool:
        """Whether questions are not answered any more."""
        return self.num_left < 0

    def fits_nothing(self, schemas: Iterable[Any], context: Iterable[Any] = ()) -> bool:
        """Say whether certainly no value fits all schemas, those of `context` without their branches."""
        plain: list[dict[str, Any]] = []
        depth = _DEPTH_OF_LOOPS if self.has_end else _DEPTH
        return not self._spread(list(context), plain, []) or self._is_empty(plain, list(schemas), [], depth)

    def _is_empty(self, plain: list[dict[str, Any]], others: list[Any], choices: list[Any], depth: int) -> bool:
        self.num_left -= 1
        if self.num_left < 0 or depth < 0:
            return False
        plain, choices = list(plain), list(choices)
        if self.has_end and any(self._is_circle(one, frozenset()) for one in others):
            return True
        if not self._spread(others, plain, choices):
            return True
        if not self.has_end:
            return self._has_no_value(plain, choices, depth)
        asked = frozenset(map(id, [*(schema for schema in plain if schema.keys() != {"$ref"}), *choices]))
        if asked in self._asked or asked in self._fitted:
            return asked in self._asked
        self._asked.add(asked)
        is_empty = self._has_no_value(plain, choices, depth)
        self._asked.remove(asked)
        if not is_empty:
            self._fitted.add(asked)
        return is_empty

    def _has_no_value(self, plain: list[dict[str, Any]], choices: list[Any], depth: int) -> bool:
        if self._excludes_all(plain, depth):
            return True
        return bool(choices) and all(self._is_empty(plain, [one], choices[1:], depth - 1) for one in choices[0])

    def _is_circle(self, schema: Any, above: frozenset[int]) -> bool:
        """Say whether a schema is a part of itself."""
        self.num_left -= 1
        if not isinstance(schema, dict) or self.num_left < 0:
            return False
        parts = [self.target(schema), *([] if self.is_alone and "$ref" in schema else _listed(schema, "allOf"))]
        return id(schema) in above or any(self._is_circle(one, above | {id(schema)}) for one in parts)

    def _spread(self, schemas: list[Any], plain: list[dict[str, Any]], choices: list[Any]) -> bool:
        """Add what all schemas say, and their lists of branches, unless one fits nothing."""
        seen = set(map(id, plain))
        while schemas:
            schema = schemas.pop()
            if schema is False:
                return False
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            target = self.target(schema)
            if target is not None:
                schemas.append(target)
            if target is None or not self.is_alone:
                plain.append(schema)
                schemas += _listed(schema, "allOf")
                choices += [schema[keyword] for keyword in _CHOICES if _listed(schema, keyword)]
        return True

    def _excludes_all(self, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        values = next((values for schema in plain if (values := _values(schema)) is not None), None)
        if values is not None:
            return all(any(self._excludes(schema, value, depth) for schema in plain) for value in values)
        kinds = frozenset[str].intersection(_KINDS, *(_kinds(schema) for schema in plain))
        return all(_is_without_room(kind, plain) or self._lacks_parts(kind, plain, depth) for kind in kinds)

    def _lacks_parts(self, kind: str, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        if kind == "array":
            return self._lacks_items(plain, depth)
        return kind == "object" and (self._has_none(plain, depth) or self._lacks_members(plain, depth))

    def _lacks_items(self, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        """Say whether no array has its least number of items that fit."""
        least = max((schema["minItems"] for schema in plain if is_number(schema.get("minItems"))), default=0)
        num_different = 1 + max((len(_first_items(schema)) for schema in plain), default=0)
        return any(
            self._is_empty([], [_item(schema, place) for schema in plain], [], depth - 1)
            for place in range(min(int(least), num_different))
        )

    def _lacks_members(self, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        """Say whether objects must have members, and no key has a value that fits."""
        if not any(is_number(least := schema.get("minProperties")) and least > 0 for schema in plain):
            return False
        return any(all(self._is_empty([], [one], [], depth - 1) for one in _members(schema)) for schema in plain)

    def _has_none(self, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        """Say whether no object has all required keys with values that fit."""
        required = dict.fromkeys(key for schema in plain for key in _listed(schema, "required") if isinstance(key, str))
        return _is_without_room("object", [*plain, {"minProperties": len(required)}]) or any(
            self._is_empty([], [_member(schema, key) for schema in plain], [], depth - 1) for key in required
        )

    def _excludes(self, schema: dict[str, Any], value: Any, depth: int) -> bool:
        """Say whether a value does not fit what a schema says itself."""
        self.num_left -= 1
        if self.num_left < 0:
            return False
        kind = _kind(value)
        if kind not in _kinds(schema) or not self._lists(schema, value):
            return True
        if kind in _ENDS and _is_without_room(kind, [schema, _of_size(kind, value)]):
            return True
        if kind == "array":
            items = [] if _listed(schema, "prefixItems") or isinstance(schema.get("items"), list) else value
            return any(self._is_empty([], [{"const": one}, schema.get("items")], [], depth - 1) for one in items)
        if kind != "object":
            return False
        return any(key not in value for key in _listed(schema, "required") if isinstance(key, str)) or any(
            self._is_empty([], [{"const": one}, _member(schema, key)], [], depth - 1) for key, one in value.items()
        )

    def _lists(self, schema: dict[str, Any], value: Any) -> bool:
        """Say whether a value is one of those that a schema lists, if it lists some."""
        if "const" in schema:
            return name_of(value) == name_of(schema["const"])
        values = schema.get("enum")
        if not isinstance(values, list):
            return True
        if id(values) not in self._texts:
            self._texts[id(values)] = frozenset(map(name_of, values)), values
        return name_of(value) in self._texts[id(values)][0]


def are_told_by_a_key(schemas: Sequence[tuple[Any, Any]]) -> bool:
    """Say whether a key tells all schemas apart, and they are of objects alone.

    Args:
        schemas: Each as it is closed, and as written.
    """
    written = [one for closed, one in schemas if isinstance(closed, dict) and _kinds(closed) == {"object"}]
    return len(written) == len(schemas) and all(isinstance(one, dict) for one in written) and has_apart_values(written)


def has_apart_values(schemas: Sequence[dict[str, Any]]) -> bool:
    """Say whether a key that all schemas require has other listed values in each."""
    if not schemas:
        return False
    required = [{key for key in _listed(one, "required") if isinstance(key, str)} for one in schemas]
    keys = required[0].intersection(*required[1:])
    return any(_are_apart([_values(_member(one, key)) for one in schemas]) for key in keys)


def _are_apart(lists: Sequence[list[Any] | None]) -> bool:
    """Say whether no value is in two lists, each of which exists."""
    texts = [frozenset(map(name_of, values)) for values in lists if values is not None]
    return len(texts) == len(lists) and len(frozenset[str]().union(*texts)) == sum(map(len, texts))


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _values(schema: Any) -> list[Any] | None:
    """Return the values that a schema lists, if it does."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    said = schema.get("type")
    types = [said] if isinstance(said, str) else said
    if not isinstance(types, list):
        return _KINDS
    return frozenset("number" if one == "integer" else one for one in types if isinstance(one, str))


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", list: "array", dict: "object"}
    return next((kind for of, kind in kinds.items() if isinstance(value, of)), "number")


def name_of(value: Any) -> str:
    """Return a text that equal values share, as 1 and 1.0."""
    if isinstance(value, list):
        return f"[{','.join(map(name_of, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{name_of(value[key])}" for key in sorted(value)) + "}"
    return str(int(value)) if is_number(value) and value == math.trunc(value) else json.dumps(value)


def _member(schema: dict[str, Any], key: str) -> Any:
    """Return what a schema says of a key's value."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _members(schema: dict[str, Any]) -> list[Any]:
    """Return what a schema says of any key's value."""
    maps = (schema.get(keyword) for keyword in ("properties", "patternProperties"))
    said = [one for inner in maps if isinstance(inner, dict) for one in inner.values()]
    return [*said, schema.get("additionalProperties", True)]


def _first_items(schema: dict[str, Any]) -> list[Any]:
    return _listed(schema, "prefixItems") or _listed(schema, "items")


def _item(schema: dict[str, Any], place: int) -> Any:
    """Return what a schema says of an array's item."""
    first = _first_items(schema)
    others = "additionalItems" if isinstance(schema.get("items"), list) else "items"
    return first[place] if place < len(first) else schema.get(others, True)


def _of_size(kind: str, value: Any) -> dict[str, Any]:
    size = value if kind == "number" else len(value)
    return {ends[0][0]: size for ends in _ENDS[kind]}


def _is_without_room(kind: str, plain: Sequence[dict[str, Any]]) -> bool:
    """Say whether a least is above a most."""
    least, most = (
        [(schema[name], is_open) for schema in plain for name, is_open in ends if is_number(schema.get(name))]
        for ends in _ENDS.get(kind, ((), ()))
    )
    if not least or not most:
        return False
    (low, is_above), (high, is_below) = max(least), min(most, key=lambda end: (end[0], not end[1]))
    return low > high or (low == high and (is_above or is_below))
