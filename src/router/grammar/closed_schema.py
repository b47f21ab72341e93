"""A JSON schema as its author means it, before it is compiled."""

# Objects that do not say whether they are open are closed: unnamed keys are never generated. TGI's behaviour: an object
# with `properties` and without `additionalProperties` has the named keys only. Objects without `properties` stay open
# (any object). Schemas that are merged with others (`allOf`, `$ref` with siblings) stay as they are: closing one part
# would forbid the keys of the other.
#
# What has `properties` and no `type` is an object, as in TGI. A `format` that cannot be enforced says something about
# the text and is left out, as JSON Schema has it.

from __future__ import annotations

from typing import Any

from router.grammar.conditions import named_keys, without_conditions
from router.grammar.exact_schema import enforceable, joins_bounds
from router.grammar.look_ahead import without_look_ahead
from router.grammar.object_keys import with_plain_keys

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE_SCHEMAS = ("items", "additionalProperties", "contains")
_DEFINITIONS = ("$defs", "definitions")
_BRANCHES = ("anyOf", "oneOf")
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)  # fmt: skip
"""Those that llguidance enforces; it refuses all others."""
_TYPED = frozenset({"type", "enum", "const"})
_SAY_WHETHER_OPEN = ("additionalProperties", "unevaluatedProperties")
# With one of these beside it, a reference or a list of branches is one part of several.
_PARTS = frozenset({"properties", "patternProperties", "required", "$ref", "allOf", "anyOf", "oneOf"})


def close_objects(schema: Any) -> Any:
    """Copy the schema, closed.

    Raises:
        RecursionError: It is nested too deeply.
        ValueError: A keyword cannot be enforced.
    """
    merged: set[str] = set()
    has_parts = joins_bounds(schema)
    while True:
        pass_ = _Pass(schema, merged, has_parts=has_parts)
        closed = pass_.closed(schema, is_merged="#" in merged, path="#")
        if pass_.found <= merged:
            return closed
        # A definition that turned out to be merged may refer to others: look again.
        merged |= pass_.found


class _Pass:
    """One walk over a schema, with references known (`merged`) and found to be merged.

    `has_parts`: whether a number's bounds may be in several places.
    """

    def __init__(self, root: Any, merged: set[str], *, has_parts: bool) -> None:
        self._root = root
        self._merged = frozenset(merged)
        self._has_parts = has_parts
        self.found: set[str] = set()

    def closed(self, schema: Any, *, is_merged: bool, path: str | None = None) -> Any:
        """Close a schema; `path` is where references can name it."""
        if not isinstance(schema, dict):
            return schema
        written, schema = schema, without_conditions(schema)
        if not is_merged and schema is not written and _has_own_keys(written, schema):
            schema = {"additionalProperties": False} | schema
        schema = enforceable(without_look_ahead(schema), is_part=self._has_parts)
        parts = _PARTS & schema.keys()
        has_several = len(parts) > 1
        reference = schema.get("$ref")
        if isinstance(reference, str) and (is_merged or has_several):
            self.found.add(reference)
        copy = {
            keyword: self._value(keyword, value, is_merged=is_merged, has_several=has_several, path=path)
            for keyword, value in schema.items()
        }
        if not is_merged and _is_whole(schema, parts):
            copy["additionalProperties"] = False
        if isinstance(schema.get("properties"), dict) and not _TYPED & schema.keys():
            copy["type"] = "object"
        if isinstance(format := schema.get("format"), str) and format not in _FORMATS:
            del copy["format"]
        return with_plain_keys(copy, self._root, is_merged=is_merged)

    def _value(self, keyword: str, value: Any, *, is_merged: bool, has_several: bool, path: str | None) -> Any:
        if keyword in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            is_definition = keyword in _DEFINITIONS and path is not None
            return {
                name: self._named(inner, f"{path}/{keyword}/{_escaped(name)}" if is_definition else None)
                for name, inner in value.items()
            }
        if keyword in _SINGLE_SCHEMAS:
            return self.closed(value, is_merged=False)
        if isinstance(value, list):
            if keyword == "prefixItems":
                return [self.closed(inner, is_merged=False) for inner in value]
            if keyword in _BRANCHES:
                return [self.closed(inner, is_merged=is_merged or has_several) for inner in value]
            if keyword == "allOf":
                several = is_merged or has_several or len(value) > 1
                return [self.closed(inner, is_merged=several) for inner in value]
        return value

    def _named(self, schema: Any, path: str | None) -> Any:
        return self.closed(schema, is_merged=path in self._merged, path=path)


def _is_whole(schema: dict[str, Any], parts: frozenset[str]) -> bool:
    """Whether an object names its keys and is not combined."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(keyword in schema for keyword in _SAY_WHETHER_OPEN):
        return False
    if not parts <= {"properties", "patternProperties", "required"}:
        return False
    required = schema.get("required")
    # A key that is required and nowhere described must stay possible.
    return not isinstance(required, list) or "patternProperties" in schema or all(
        isinstance(name, str) and name in properties for name in required
    )  # fmt: skip


def _has_own_keys(written: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether an object names its keys, and its conditions no others."""
    named = named_keys({"allOf": schema.get("allOf", [])})
    return _is_whole(written, _PARTS & written.keys()) and named is not None and named <= written["properties"].keys()


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
