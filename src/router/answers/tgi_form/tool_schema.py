"""TGI's schema of tool calls, a branch per function: `{"function": {"_name": NAME, ...arguments}}`.

Whole tool schemas are definitions, too, for their local references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from router.answers.tgi_form.call_parser import NAME_KEY
from router.errors import ToolError
from router.grammar.object_keys import with_plain_keys
from router.grammar.references import at

NO_TOOL = "no_tool"
"""The function that a model "calls" to answer with text instead."""

Schema = dict[str, Any]

_COMBINATORS = ("anyOf", "oneOf", "allOf")
_ANNOTATIONS = frozenset({"title", "description", "$comment", "$defs", "definitions", "examples", "default", "type"})
_IDENTITY = ("$schema", "$id", "id")  # of a document that the schema is no longer
# Their values are data: a `$ref` in there is none.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = ("minProperties", "maxProperties")
_MAX_BRANCHES = 64
_MAX_DEPTH = 16


def call_schema(functions: Sequence[tuple[str, Any]], *, or_none: bool) -> Schema:
    """Return the schema of a call, or of none with `or_none`."""
    branches: list[Schema] = []
    definitions: Schema = {}
    for index, (name, parameters) in enumerate(functions):
        tool = _Tool(name, parameters, place=f"#/$defs/tool_{index}")
        branches += tool.branches()
        definitions[f"tool_{index}"] = tool.schema
    if or_none:
        branches.append(_call(NO_TOOL, {}))
    return {
        "type": "object",
        "properties": {"function": {"anyOf": branches}},
        "required": ["function"],
        "additionalProperties": False,
        "$defs": definitions,
    }


class _Tool:
    """A function's parameters, with references from `place`."""

    def __init__(self, name: str, parameters: Any, *, place: str) -> None:
        self._name = name
        self._place = place
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
        objects = self._alternatives(self.schema, 0)
        if len(objects) > _MAX_BRANCHES:
            raise self._error(f"have more than {_MAX_BRANCHES} alternatives")
        for one in objects:
            self._check_object(one)
        return [_call(self._name, self._with_plain_keys(one)) for one in objects]

    def _with_plain_keys(self, schema: Schema) -> Schema:
        """Write what `propertyNames` says of the arguments alone, without the key of the name."""
        if "propertyNames" not in schema:
            return schema
        closed = schema if schema.get("properties") is None else {"additionalProperties": False, **schema}
        root = {"$defs": {self._place.rpartition("/")[2]: self.schema}}
        try:
            # Patterns are written for the grammar with the whole schema.
            return with_plain_keys(closed, lambda names: at(root, names["$ref"]), is_merged=False, write=str)
        except ValueError as error:
            raise self._error(f"cannot be enforced: {error}") from None

    def _alternatives(self, schema: Any, depth: int) -> list[Schema]:
        """Return objects that a reference or choice stands for."""
        if not isinstance(schema, dict):
            raise self._error("must be a JSON schema of an object")
        if depth > _MAX_DEPTH:
            raise self._error("refer to each other too often")
        keywords = schema.keys() - _ANNOTATIONS
        if keywords == {"$ref"}:
            return self._alternatives(self._target(schema["$ref"]), depth + 1)
        keyword = next(iter(keywords)) if len(keywords) == 1 else ""
        inner = schema.get(keyword)
        if keyword not in _COMBINATORS or (keyword == "allOf" and isinstance(inner, list) and len(inner) > 1):
            return [schema]
        if not isinstance(inner, list) or not 0 < len(inner) <= _MAX_BRANCHES:
            raise self._error(f"must have a list of 1 to {_MAX_BRANCHES} schemas in `{keyword}`")
        found: list[Schema] = []
        for one in inner:
            found += self._alternatives(one, depth + 1)
            if len(found) > _MAX_BRANCHES:
                break
        return found

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


def _call(name: str, parameters: Schema) -> Schema:
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
    if others is not None or not rest.keys() & {*_COMBINATORS, "$ref"}:
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
        elif keyword in _MAPS and isinstance(value, dict):
            copy[keyword] = {name: _relocated(inner, place) for name, inner in value.items()}
        else:
            copy[keyword] = value if keyword in _DATA else _relocated(value, place)
    return copy
