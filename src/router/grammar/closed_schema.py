"""A JSON schema as its author means it, before it is compiled."""

# Objects that do not say whether they are open are closed: unnamed keys are never generated. TGI's behaviour: an object
# with `properties` and without `additionalProperties` has the named keys only. Objects without `properties` stay open
# (any object). Schemas that are merged with others (`allOf`, `$ref` with siblings) stay as they are: closing one part
# would forbid the keys of the other.
#
# What has `properties` and no `type` is an object, as in TGI. A `format` that cannot be enforced says something about
# the text and is left out, as JSON Schema has it.

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from router.grammar.conditions import named_keys, without_conditions
from router.grammar.exact_schema import enforceable, joins_bounds
from router.grammar.look_ahead import without_look_ahead
from router.grammar.object_keys import KeyPatterns, with_plain_keys
from router.grammar.one_of import Branches
from router.grammar.references import ROOT, Address, Places, step

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE_SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains")
_JOINING = ("allOf", "anyOf", "oneOf")
_LISTS_OF_SCHEMAS = ("items", "prefixItems", *_JOINING)
_DATA = ("const", "enum")
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
    known = _Known(Places(schema))
    has_parts = joins_bounds(schema)
    while True:
        before, pass_ = known.size, _Pass(known, has_parts=has_parts)
        closed = pass_.closed(schema, is_merged=ROOT in known.merged, path=ROOT, address=known.places.address)
        # A schema that turned out to be merged or referred to may refer to others: look again.
        if known.size != before:
            continue
        for reference, path in pass_.references:
            if path not in pass_.walked:
                raise ValueError(f"the `$ref` {reference} leads to no schema within this one")
        pass_.branches.enforce(ROOT)
        return closed


@dataclass
class _Known:
    """Paths that walks find."""

    places: Places
    merged: set[str] = field(default_factory=set)
    # Referred to, wherever they are.
    reached: set[str] = field(default_factory=set)
    patterns: KeyPatterns = field(default_factory=KeyPatterns)

    @property
    def size(self) -> int:
        return len(self.merged) + len(self.reached) + len(self.places)


class _Pass:
    """One walk over a schema.

    `has_parts`: whether a number's bounds may be in several places.
    """

    def __init__(self, known: _Known, *, has_parts: bool) -> None:
        self._known = known
        self._merged = frozenset(known.merged)
        self._has_parts = has_parts
        self.walked: set[str] = set()
        # A text leads elsewhere in other documents.
        self.references: list[tuple[str, str | None]] = []
        self.branches = Branches(is_alone=known.places.is_alone)

    def closed(self, schema: Any, *, is_merged: bool, path: str, address: Address) -> Any:
        """Close a schema; `path` is where references can name it."""
        self.walked.add(path)
        if not isinstance(schema, dict):
            self.branches.add(path, schema, schema)
            return schema
        is_merged = is_merged or path in self._merged
        address = self._known.places.add(schema, path, address)
        written, schema = schema, without_conditions(schema)
        if not is_merged and schema is not written and _has_own_keys(written, schema):
            schema = {"additionalProperties": False} | schema
        schema = enforceable(without_look_ahead(schema), is_part=self._has_parts)
        parts = _PARTS & schema.keys()
        has_several = len(parts) > 1
        target = None
        if isinstance(reference := schema.get("$ref"), str):
            target = self._refer(reference, address, is_merged=is_merged or has_several)
        copy = {
            keyword: self._value(
                keyword, value, is_merged=is_merged, has_several=has_several, path=step(path, keyword), address=address
            )
            for keyword, value in schema.items()
        }
        if not is_merged and _is_whole(schema, parts):
            copy["additionalProperties"] = False
        if isinstance(schema.get("properties"), dict) and not _TYPED & schema.keys():
            copy["type"] = "object"
        if isinstance(format := schema.get("format"), str) and format not in _FORMATS:
            del copy["format"]
        copy = with_plain_keys(copy, partial(self._named, address), is_merged=is_merged, patterns=self._known.patterns)
        self.branches.add(path, written, copy, target)
        return copy

    def _refer(self, reference: str, address: Address, *, is_merged: bool) -> str | None:
        target = self._known.places.find(reference, address)
        self.references.append((reference, target))
        if target is not None:
            self._known.reached.add(target)
            if is_merged:
                self._known.merged.add(target)
        return target

    def _named(self, address: Address, schema: dict[str, Any]) -> Any:
        """Return what the reference of a schema of names leads to: no name, as long as that is not known."""
        reference, places = schema["$ref"], self._known.places
        if (target := places.named(reference, places.within.get(id(schema), address))) is not None:
            return target
        self.references.append((reference, None))
        return False

    def _value(
        self, keyword: str, value: Any, *, is_merged: bool, has_several: bool, path: str, address: Address
    ) -> Any:
        if keyword in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            return {
                name: self.closed(inner, is_merged=False, path=step(path, name), address=address)
                for name, inner in value.items()
            }
        if keyword in _LISTS_OF_SCHEMAS and isinstance(value, list):
            is_part = keyword in _JOINING and (is_merged or has_several or (keyword == "allOf" and len(value) > 1))
            return [
                self.closed(inner, is_merged=is_part, path=step(path, number), address=address)
                for number, inner in enumerate(value)
            ]
        if keyword in _SINGLE_SCHEMAS:
            return self.closed(value, is_merged=False, path=path, address=address)
        return value if keyword in _DATA else self._reached(value, path, address)

    def _reached(self, value: Any, path: str, address: Address) -> Any:
        """Close what references name behind a keyword without a meaning, such as `components`."""
        if path in self._known.reached:
            return self.closed(value, is_merged=False, path=path, address=address)
        if isinstance(value, dict):
            return {name: self._reached(inner, step(path, name), address) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._reached(inner, step(path, number), address) for number, inner in enumerate(value)]
        return value


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
