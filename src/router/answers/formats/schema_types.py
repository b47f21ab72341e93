"""JSON types of arguments, which decide unquoted text."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from router.grammar.references import at
from router.grammar.unfit import has_apart_values

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_DEPTH = 16


class ArgumentTypes:
    """An answer's functions; unknown arguments may be of any type."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def schema_of(self, name: str) -> Any:
        return self._schemas.get(name)

    @property
    def only_name(self) -> str | None:
        return next(iter(self._schemas)) if len(self._schemas) == 1 else None

    def of(self, name: str, key: str) -> frozenset[str]:
        root = self._schemas.get(name)
        properties = root.get("properties") if isinstance(root, dict) else None
        return _types(properties.get(key), root, 0) if isinstance(properties, dict) else JSON_TYPES

    def has(self, name: str, key: str) -> bool:
        """Return if a function may take an argument."""
        root = self._schemas.get(name)
        properties = root.get("properties") if isinstance(root, dict) else None
        return not isinstance(properties, dict) or key in properties

    def json_of(self, text: str, types: frozenset[str]) -> str:
        """Return unquoted text as JSON: itself if of a right type, else a string."""
        if types != {"string"}:
            try:
                value = json.loads(text, parse_constant=_refuse)
            except (ValueError, RecursionError):
                pass
            else:
                if _type_of(value) & types and not (isinstance(value, str) and "string" not in types):
                    return text.strip()
            if (written := _of_python(text, types)) is not None:
                return written
        return json.dumps(text, ensure_ascii=False)


def _of_python(text: str, types: frozenset[str]) -> str | None:
    """Return a Python literal's JSON, unless it may be text."""
    try:
        value = ast.literal_eval(text.strip())
        if ("string" in types and (value is not None or types == JSON_TYPES)) or not _type_of(value) & types:
            return None
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _types(schema: Any, root: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return JSON_TYPES
    given = schema.get("type")
    if isinstance(given, str):
        return _widened([given])
    if isinstance(given, list):
        return _widened(one for one in given if isinstance(one, str))
    if "const" in schema:
        return _type_of(schema["const"])
    if isinstance(schema.get("enum"), list):
        return frozenset[str]().union(*(_type_of(value) for value in schema["enum"]))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            return frozenset[str]().union(*(_types(one, root, depth + 1) for one in schema[keyword]))
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_target(reference, root), root, depth + 1)
    return JSON_TYPES


def types_in(schema: Any, root: Any) -> frozenset[str]:
    """Return the types that a schema within `root` allows."""
    return _types(schema, root, 0)


def exclude_each_other(schemas: Sequence[Any], root: Any) -> bool:
    """Say whether types differ, or the listed values of a common key."""
    if all(not one & other for one, other in combinations([types_in(one, root) for one in schemas], 2)):
        return True
    if any(types_in(one, root) != {"object"} for one in schemas):
        return False
    found = [resolved(one, root) for one in schemas]
    try:
        return all(isinstance(one, dict) for one in found) and has_apart_values(found)
    except RecursionError:  # a listed value is nested deeply
        return False


def member_of(schema: Any, key: str | None, root: Any, depth: int = 0) -> Any:
    """Return the schema of an object's member, or of a list's items; None: anything."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    properties = schema.get("properties")
    if key is None and isinstance(schema.get("items"), dict):
        return schema["items"]
    if key is not None and isinstance(properties, dict) and key in properties:
        return properties[key]
    given = [schema.get(keyword) for keyword in ("anyOf", "oneOf", "allOf")]
    parts = [one for some in given if isinstance(some, list) for one in some]
    if isinstance(reference := schema.get("$ref"), str):
        parts.append(_target(reference, root))
    found = (member_of(one, key, root, depth + 1) for one in parts)
    return next((one for one in found if one is not None), None if key is None else schema.get("additionalProperties"))


def without_unknown_types(schema: Any) -> Any:
    """Let arguments be anything whose type JSON does not have."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return schema
    known = {key: {} if _has_unknown_type(one) else one for key, one in properties.items()}
    return schema if known == properties else {**schema, "properties": known}


def _has_unknown_type(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("type"), str) and schema["type"] not in JSON_TYPES


def resolved(schema: Any, root: Any) -> Any:
    """Follow a schema that is only a reference."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str) or len(schema) > 1:
            return schema
        schema = _target(reference, root)
    return None


def _widened(types: Iterable[str]) -> frozenset[str]:
    found = frozenset(types) & JSON_TYPES
    return found | {"integer"} if "number" in found else found or JSON_TYPES


def _target(reference: str, root: Any) -> Any:
    return at(root, unquote(reference.removeprefix("#")))


def _type_of(value: Any) -> frozenset[str]:
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    for kind, name in ((float, "number"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return frozenset({name})
    return frozenset({"null"})


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
