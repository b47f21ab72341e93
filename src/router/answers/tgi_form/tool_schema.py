"""TGI's schema of tool calls, a branch per function: `{"function": {"_name": NAME, ...arguments}}`.

Whole tool schemas are definitions, too, for their local references.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from router.answers.tgi_form.call_parser import NAME_KEY
from router.errors import ToolError
from router.grammar.object_keys import KeyPatterns, with_plain_keys
from router.grammar.references import DATA, MAPS, Places, at, places_of

NO_TOOL = "no_tool"
"""The function that a model "calls" to answer with text instead."""

Schema = dict[str, Any]

_COMBINATORS = ("anyOf", "oneOf", "allOf")
_ANNOTATIONS = frozenset({"title", "description", "$comment", "$defs", "definitions", "examples", "default", "type"})
_IDENTITY = ("$schema", "$id", "id")  # of a document that the schema is no longer
_COUNTS = ("minProperties", "maxProperties")
_MAX_BRANCHES = 64
_MAX_DEPTH = 16


def call_schema(functions: Sequence[tuple[str, Any]], *, or_none: bool) -> Schema:
    """Return the schema of a call, or of none with `or_none`."""
    return call_schema_in_words(functions, or_none=or_none)[0]


def call_schema_in_words(
    functions: Sequence[tuple[str, Any]], *, or_none: bool
) -> tuple[Schema, tuple[tuple[str, str], ...]]:
    """Return `call_schema`, and places within it with what a client calls them."""
    branches: list[Schema] = []
    definitions: Schema = {}
    words: dict[str, str] = {}
    patterns = KeyPatterns()
    for index, (name, parameters) in enumerate(functions):
        tool = _Tool(name, parameters, place=f"#/$defs/tool_{index}", patterns=patterns)
        own = tool.branches()
        places = (
            f"#/$defs/tool_{index}",
            *(f"#/properties/function/anyOf/{len(branches) + n}" for n in range(len(own))),
        )
        words |= dict.fromkeys(places, f"the parameters of the function `{name}`, #")
        branches += own
        definitions[f"tool_{index}"] = tool.schema
    if or_none:
        branches.append(_call(NO_TOOL, {}))
    schema: Schema = {
        "type": "object",
        "properties": {"function": {"anyOf": branches}},
        "required": ["function"],
        "additionalProperties": False,
        "$defs": definitions,
    }
    return schema, tuple(words.items())


class _Tool:
    """A function's parameters, with references from `place`."""

    def __init__(self, name: str, parameters: Any, *, place: str, patterns: KeyPatterns) -> None:
        self._name = name
        self._patterns = patterns
        self._place = place
        self._num_objects = 0
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, dict):
            raise self._error("must be a JSON schema of an object")
        schema = {keyword: value for keyword, value in parameters.items() if keyword not in _IDENTITY}
        try:
            self.schema: Schema = _relocated(schema, place)
        except RecursionError:
            raise self._error("are nested too deeply") from None

    def branches(self) -> list[Schema]:
        """The calls that the parameters allow."""
        return self._branches(self.schema, 0, closes=True)

    def _with_plain_keys(self, schema: Schema) -> Schema:
        """Write what `propertyNames` says of the arguments alone, without the key of the name."""
        if "propertyNames" not in schema:
            return schema
        closed = schema if schema.get("properties") is None else {"additionalProperties": False, **schema}
        try:
            # Patterns are written for the grammar with the whole schema.
            return with_plain_keys(closed, self._named, is_merged=False, write=str, patterns=self._patterns)
        except ValueError as error:
            raise self._error(f"cannot be enforced: {error}") from None

    def _named(self, names: Schema) -> Any:
        """Return what the reference of a schema of names leads to."""
        reference = names["$ref"]
        if reference[:1] != "#" or reference[1:2] == "/":  # of another document, or moved
            return self._target(reference)
        found = self._places.named(reference, self._places.within.get(id(names), self._places.address))
        return self._target(reference) if found is None else found

    @cached_property
    def _places(self) -> Places:
        return places_of(self.schema)

    def _branches(self, schema: Any, depth: int, *, closes: bool) -> list[Schema]:
        """Return calls with the objects that a reference or choice stands for; branches of `oneOf` stay together."""
        if not isinstance(schema, dict):
            raise self._error("must be a JSON schema of an object")
        if depth > _MAX_DEPTH:
            raise self._error("refer to each other too often")
        keywords = schema.keys() - _ANNOTATIONS
        if keywords == {"$ref"}:
            return self._branches(self._target(schema["$ref"]), depth + 1, closes=closes)
        keyword = next(iter(keywords)) if len(keywords) == 1 else ""
        inner = schema.get(keyword)
        if keyword not in _COMBINATORS or (keyword == "allOf" and isinstance(inner, list) and len(inner) > 1):
            return [self._of_object(schema, closes=closes)]
        if not isinstance(inner, list) or not 0 < len(inner) <= _MAX_BRANCHES:
            raise self._error(f"must have a list of 1 to {_MAX_BRANCHES} schemas in `{keyword}`")
        is_one = keyword == "oneOf" and len(inner) > 1
        # Whether they exclude each other is a question of what was written: only then are they closed.
        choices = [self._branches(one, depth + 1, closes=closes and not is_one) for one in inner]
        if is_one:
            return [{"oneOf": [one[0] if len(one) == 1 else {"anyOf": one} for one in choices]}]
        return [one for choice in choices for one in choice]

    def _of_object(self, schema: Schema, *, closes: bool) -> Schema:
        self._num_objects += 1
        if self._num_objects > _MAX_BRANCHES:
            raise self._error(f"have more than {_MAX_BRANCHES} alternatives")
        self._check_object(schema)
        return _call(self._name, self._with_plain_keys(schema), closes=closes)

    def _target(self, reference: Any) -> Any:
        if reference == self._place:
            raise self._error("refer to themselves")
        if not isinstance(reference, str) or not reference.startswith(f"{self._place}/"):
            raise self._error("have a reference that does not resolve")
        value = at(self.schema, unquote(reference[len(self._place) :]))
        if value is None:
            raise self._error("have a reference that does not resolve")
        return value

    def _check_object(self, schema: Schema) -> None:
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise self._error("must be of type object")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise self._error("must have an object in `properties` and a list in `required`")
        if NAME_KEY in properties:
            raise self._error(f"cannot have a property `{NAME_KEY}`, which is reserved for the function's name")

    def _error(self, detail: str) -> ToolError:
        return ToolError(f"the parameters of the function `{self._name}` {detail}", param="tools")


def _call(name: str, parameters: Schema, *, closes: bool = True) -> Schema:
    """Return a call's object, closed by default."""
    rest = {
        keyword: value
        for keyword, value in parameters.items()
        if keyword not in _ANNOTATIONS and keyword not in ("properties", "required", "additionalProperties")
    }
    for keyword in _COUNTS:
        if isinstance(rest.get(keyword), int):
            rest[keyword] += 1  # the name is one more
    call = {
        "type": "object",
        "properties": {NAME_KEY: {"type": "string", "const": name}, **parameters.get("properties", {})},
        "required": [NAME_KEY, *parameters.get("required", [])],
        **rest,
    }
    others = parameters.get("additionalProperties")
    if others == "true":  # TGI's way of saying it
        others = True
    # What is combined with other schemas cannot be closed here: their properties would be forbidden.
    if others is not None or (closes and not rest.keys() & {*_COMBINATORS, "$ref"}):
        call["additionalProperties"] = False if others is None else others
    return call


def _relocated(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_relocated(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    copy: Schema = {}
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            copy[keyword] = place + value[1:]
        elif keyword in MAPS and isinstance(value, dict):
            copy[keyword] = {name: _relocated(inner, place) for name, inner in value.items()}
        else:
            copy[keyword] = value if keyword in DATA else _relocated(value, place)
    return copy
