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


@dataclass
class Joint:
    """Schemas that a value fits together; what is not understood of them counts as absent."""

    # What a schema's `$ref` leads to; None: the schema has none.
    target: Callable[[dict[str, Any]], Any]
    # Whether nothing beside a `$ref` counts.
    is_alone: bool = False
    # Of all questions together.
    num_left: int = field(default=_STEPS, init=False)
    # The texts of a list of values, by its identity, and the list.
    _texts: dict[int, tuple[frozenset[str], list[Any]]] = field(default_factory=dict, init=False)

    @property
    def is_tired(self) -> bool:
        """Whether questions are not answered any more."""
        return self.num_left < 0

    def fits_nothing(self, schemas: Iterable[Any], context: Iterable[Any] = ()) -> bool:
        """Say whether certainly no value fits all schemas, those of `context` without their branches."""
        plain: list[dict[str, Any]] = []
        return not self._spread(list(context), plain, []) or self._is_empty(plain, list(schemas), [], _DEPTH)

    def lists_nothing(self, plain: Sequence[dict[str, Any]], depth: int = _DEPTH) -> bool | None:
        """Say whether none of the values that a schema lists fits all, leaving out their branches; None: none lists."""
        values = next((values for schema in plain if (values := _values(schema)) is not None), None)
        if values is None:
            return None
        return all(any(self._excludes(schema, value, depth) for schema in plain) for value in values)

    def _is_empty(self, plain: list[dict[str, Any]], others: list[Any], choices: list[Any], depth: int) -> bool:
        self.num_left -= 1
        if self.num_left < 0 or depth < 0:
            return False
        plain, choices = list(plain), list(choices)
        if not self._spread(others, plain, choices):
            return True
        if self._excludes_all(plain, depth):
            return True
        return bool(choices) and all(self._is_empty(plain, [one], choices[1:], depth - 1) for one in choices[0])

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
                schemas += list_of(schema, "allOf")
                choices += [schema[keyword] for keyword in _CHOICES if list_of(schema, keyword)]
        return True

    def _excludes_all(self, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        if (is_without := self.lists_nothing(plain, depth)) is not None:
            return is_without
        return all(is_without_room(kind, plain) or self._lacks_parts(kind, plain, depth) for kind in kinds_of(plain))

    def _lacks_parts(self, kind: str, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        if kind == "array":
            return self._lacks_items(plain, depth)
        return kind == "object" and (self._has_none(plain, depth) or self._lacks_members(plain, depth))

    def _lacks_items(self, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        """Say whether no array has its least number of items that fit."""
        return any(
            self._is_empty([], [item_of(schema, place) for schema in plain], [], depth - 1)
            for place in range(num_least_places(plain))
        )

    def _lacks_members(self, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        """Say whether objects must have members, and no key has a value that fits."""
        if not needs_members(plain):
            return False
        return any(all(self._is_empty([], [one], [], depth - 1) for one in members_of(schema)) for schema in plain)

    def _has_none(self, plain: Sequence[dict[str, Any]], depth: int) -> bool:
        """Say whether no object has all required keys with values that fit."""
        required = required_keys(plain)
        return is_without_room("object", [*plain, {"minProperties": len(required)}]) or any(
            self._is_empty([], [member_of(schema, key) for schema in plain], [], depth - 1) for key in required
        )

    def _excludes(self, schema: dict[str, Any], value: Any, depth: int) -> bool:
        """Say whether a value does not fit what a schema says itself."""
        self.num_left -= 1
        if self.num_left < 0:
            return False
        kind = _kind(value)
        if kind not in _kinds(schema) or not self._lists(schema, value):
            return True
        if kind in _ENDS and is_without_room(kind, [schema, _of_size(kind, value)]):
            return True
        if kind == "array":
            items = [] if list_of(schema, "prefixItems") or isinstance(schema.get("items"), list) else value
            return any(self._is_empty([], [{"const": one}, schema.get("items")], [], depth - 1) for one in items)
        if kind != "object":
            return False
        return any(key not in value for key in list_of(schema, "required") if isinstance(key, str)) or any(
            self._is_empty([], [{"const": one}, member_of(schema, key)], [], depth - 1) for key, one in value.items()
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
    required = [{key for key in list_of(one, "required") if isinstance(key, str)} for one in schemas]
    keys = required[0].intersection(*required[1:])
    return any(_are_apart([_values(member_of(one, key)) for one in schemas]) for key in keys)


def _are_apart(lists: Sequence[list[Any] | None]) -> bool:
    """Say whether no value is in two lists, each of which exists."""
    texts = [frozenset(map(name_of, values)) for values in lists if values is not None]
    return len(texts) == len(lists) and len(frozenset[str]().union(*texts)) == sum(map(len, texts))


def list_of(schema: dict[str, Any], keyword: str) -> list[Any]:
    """Return a keyword's list, empty if it has none."""
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


def kinds_of(schemas: Iterable[dict[str, Any]]) -> frozenset[str]:
    """Return the kinds of value that all schemas allow."""
    return frozenset[str].intersection(_KINDS, *map(_kinds, schemas))


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


def member_of(schema: dict[str, Any], key: str) -> Any:
    """Return what a schema says of a key's value."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def members_of(schema: dict[str, Any]) -> list[Any]:
    """Return what a schema says of any key's value."""
    maps = (schema.get(keyword) for keyword in ("properties", "patternProperties"))
    said = [one for inner in maps if isinstance(inner, dict) for one in inner.values()]
    return [*said, schema.get("additionalProperties", True)]


def first_items(schema: dict[str, Any]) -> list[Any]:
    """Return what a schema says of the items of single places."""
    return list_of(schema, "prefixItems") or list_of(schema, "items")


def item_of(schema: dict[str, Any], place: int) -> Any:
    """Return what a schema says of an array's item."""
    first = first_items(schema)
    others = "additionalItems" if isinstance(schema.get("items"), list) else "items"
    return first[place] if place < len(first) else schema.get(others, True)


def num_least_places(plain: Sequence[dict[str, Any]]) -> int:
    """Return how many places of an array have an item in any case, of those that schemas tell apart."""
    least = max((schema["minItems"] for schema in plain if is_number(schema.get("minItems"))), default=0)
    return int(min(least, 1 + max((len(first_items(schema)) for schema in plain), default=0)))


def required_keys(plain: Sequence[dict[str, Any]]) -> dict[str, None]:
    """Return the keys that an object has in any case, in their order."""
    return dict.fromkeys(key for schema in plain for key in list_of(schema, "required") if isinstance(key, str))


def needs_members(plain: Sequence[dict[str, Any]]) -> bool:
    """Say whether an object has members in any case, whatever their keys."""
    return any(is_number(least := schema.get("minProperties")) and least > 0 for schema in plain)


def _of_size(kind: str, value: Any) -> dict[str, Any]:
    size = value if kind == "number" else len(value)
    return {ends[0][0]: size for ends in _ENDS[kind]}


def is_without_room(kind: str, plain: Sequence[dict[str, Any]]) -> bool:
    """Say whether a least is above a most."""
    least, most = (
        [(schema[name], is_open) for schema in plain for name, is_open in ends if is_number(schema.get(name))]
        for ends in _ENDS.get(kind, ((), ()))
    )
    if not least or not most:
        return False
    (low, is_above), (high, is_below) = max(least), min(most, key=lambda end: (end[0], not end[1]))
    return low > high or (low == high and (is_above or is_below))
