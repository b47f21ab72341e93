"""Grammar rules of arguments that are not one JSON object, by schema.

Properties are rules in order; what rules cannot say makes calls fall back to TGI's form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from router.answers.formats.format import INDEX, KIND, LINE_END, NAME, OWN_ID, SEPARATOR, SPACE, ArgumentsForm, Values
from router.answers.formats.markers import Markers
from router.answers.formats.schema_types import JSON_TYPES, ArgumentTypes, exclude_each_other, resolved, types_in

PLACES = {
    INDEX: "/[0-9]{1,6}/",
    SPACE: "/[ \\n\\t]{0,20}/",
    LINE_END: "/\\n?/",
    SEPARATOR: "/[ \\t]{0,20}[;\\n][ \\n\\t]{0,20}/",
    OWN_ID: "",
}
_CALL_ID = "[CALL_ID]"
_ITEM = "item"
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated"})
_TYPED = _NOTES | {"type"}
_OF_TEXT = _TYPED | {"enum", "const", "minLength", "maxLength"}
_OF_ARRAYS = _TYPED | {"items", "minItems", "maxItems"}
_OF_OBJECTS = _TYPED | {"properties", "required", "additionalProperties"}
_OF_FUNCTIONS = _OF_OBJECTS | {"$defs", "definitions", "$schema", "strict"}
_SCALARS = frozenset({"string", "null", "boolean", "number", "integer"})
_PYTHON_WORDS = {"boolean": '("True" | "False" | "true" | "false")', "null": '("None" | "null")'}
_QUOTED = r"/Q([^Q\\]|\\([nrtbf\\\/'\"]|u[0-9a-fA-F]{4}))"
"""The beginning of a text between quotes Q, as a regular expression that lacks its bounds and the second quote."""
_KEY = re.compile(r"[\w.-]+")
_FAR_REFERENCE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')
_MAX_DEPTH = 8
_LARGEST_COUNT = 1_000_000


class UnsuitableError(Exception):
    """Rules cannot say a schema."""


def symbols(text: str, markers: Markers) -> str:
    """Return a format's text as symbols: tokens, numbers, literals."""
    found = []
    for piece in markers.pieces(text):
        if isinstance(piece, int):
            found.append(f"<[{piece}]>")
            continue
        for literal in re.split(f"([{''.join(PLACES)}])", piece):
            if literal == OWN_ID:
                found.append(f"({symbols(_CALL_ID, markers)} /[A-Za-z0-9]{{9}}/)?")
            elif literal:
                found.append(PLACES.get(literal) or json.dumps(literal, ensure_ascii=False))
    return " ".join(found)


class ArgumentRules:
    """A grammar's rules of all functions, and JSON values' schemas."""

    def __init__(self, form: ArgumentsForm, markers: Markers) -> None:
        self.rules: list[str] = []
        self.schemas: list[Any] = []
        self._form = form
        self._markers = markers
        self._types = ArgumentTypes({})
        self._function = ""
        self._root: dict[str, Any] = {}

    def of(self, name: str, schema: Any) -> str:
        """Return a function's argument symbols."""
        if not re.fullmatch(self._form.names, name):
            raise UnsuitableError(name)
        root = {"properties": {}} if schema is None else schema
        if not isinstance(root, dict) or root.keys() - _OF_FUNCTIONS or root.get("type", "object") != "object":
            raise UnsuitableError(name)
        self._types, self._function, self._root = ArgumentTypes({name: root}), name, root
        return self._members(root, self._argument, 0)

    def _argument(self, key: str, schema: Any) -> str:
        form, parts, others = self._form, list[str](), dict[str, list[Any]]()
        opening = form.before_key + key + form.behind_key
        if form.kinds is None:
            return f"{self._symbols(opening)} {self._value(key, schema)}"
        for kind, one in self._by_type(schema, 0):  # which the key's mark says
            mark = opening.replace(KIND, form.kinds[kind])
            if kind == "string":
                parts.append(f"{self._symbols(mark)} {self._text(one, form.behind_value)}")
            else:
                others.setdefault(mark, []).append(one)
        for mark, found in others.items():
            value = self._json(found[0] if len(found) == 1 else {"anyOf": found})
            parts.append(f"{self._symbols(mark)} {value} {self._symbols(form.behind_value)}")
        return f"({' | '.join(parts)})"

    def _by_type(self, schema: Any, depth: int) -> list[tuple[str, dict[str, Any]]]:
        """Split a schema into one for each type."""
        schema = self._local(schema)
        if depth < _MAX_DEPTH and (branches := self._branches(schema)) is not None:
            return [pair for one in branches for pair in self._by_type(one, depth + 1)]
        given = schema.get("type", sorted(JSON_TYPES))
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not all(isinstance(one, str) and one in JSON_TYPES for one in types):
            raise UnsuitableError("type")
        if (choices := _choices(schema)) is None:
            return [(one, {**schema, "type": one}) for one in types]
        fitting = {one: [choice for choice in choices if types_in({"const": choice}, {}) & {one}] for one in types}
        rest = {key: value for key, value in schema.items() if key != "const"}
        return [(one, {**rest, "type": one, "enum": found}) for one, found in fitting.items() if found]

    def _value(self, key: str, schema: Any) -> str:
        types = self._types.of(self._function, key)
        if self._form.values is Values.BARE:
            if self._form.is_typed and types != {"string"} and "string" in types and not self._is_plain(schema):
                raise UnsuitableError(key)
            return self._bare(schema, 0)
        if self._form.values is Values.PYTHON:
            return self._python(schema, 0)
        if self._form.values is Values.NESTED:
            return self._nested(key, schema, 0)
        end = self._form.behind_value
        if types == {"string"}:
            return self._text(schema, end)
        if "string" in types and self._is_plain(schema):
            return self._text({}, end)
        return f"{self._json(schema)} {self._symbols(end)}"

    def _members(self, schema: dict[str, Any], member: Callable[[str, Any], str], depth: int) -> str:
        """Allow each property once, in order, with separators."""
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            raise UnsuitableError("any keys")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise UnsuitableError("required")
        if not all(isinstance(key, str) and key in properties for key in required):
            raise UnsuitableError("required")
        if not all(_KEY.fullmatch(key) for key in properties) or depth > _MAX_DEPTH:
            raise UnsuitableError("keys")
        if self._form.values is Values.PYTHON and depth == 0 and not all(key.isidentifier() for key in properties):
            raise UnsuitableError("keys")
        between = self._symbols(self._form.between)
        first, after = '""', ""  # what is left where nothing has come yet, and where something has
        for key, value in reversed(properties.items()):
            rule = self._rule(member(key, value))
            is_needed = key in required
            head = f"{rule} {after}"
            first = head if is_needed else f"({head} | {first})" if first else f"({head})?"
            after = f"{between} {head}" if is_needed else f"({between} {rule})? {after}"
            first, after = self._rule(first), self._rule(after)
        return first

    def _text(self, schema: Any, end: str) -> str:
        schema = self._local(schema)
        if schema.keys() - _OF_TEXT:
            raise UnsuitableError("text")
        if (choices := _choices(schema)) is not None:
            if not all(isinstance(one, str) and one and (not end or end not in one) for one in choices):
                raise UnsuitableError("choices")
            return f"({' | '.join(map(_literal, choices))}) {self._symbols(end)}"
        bounds = _bounds(schema)
        body = f"/(.|\\n){bounds}/"
        if self._form.ends_text:
            ends = "|".join(map(_pattern, self._form.ends_text))
            body = f"({body} & ~/(.|\\n)*({ends})(.|\\n)*/)"
        first = self._markers.pieces(end)[0]
        literal = re.split(f"[{''.join(PLACES)}]", first)[0] if isinstance(first, str) else ""
        rest = end[len(literal) :]
        if literal:
            body = f"{body} {_literal(literal)}"
        return f"{self._rule(body, is_terminal=True)} {self._symbols(rest)}"

    def _nested(self, key: str, schema: Any, depth: int) -> str:
        """Write a value, its elements, and its end."""
        end, types = self._form.behind_value.replace(NAME, key), types_in(schema, self._root)
        if types == {"string"} or ("string" in types and self._is_plain(schema)):
            return self._text(schema if types == {"string"} else {}, end)
        schema = self._local(schema)
        if "string" in types or types >= {"array", "object"}:
            return f"{self._json(schema)} {self._symbols(end)}"
        if (parts := self._alternatives(schema, depth, lambda one, depth: self._nested(key, one, depth))) is not None:
            return parts
        if schema.get("type") == "array" and not schema.keys() - _OF_ARRAYS and isinstance(schema.get("items"), dict):
            item = f"{self._symbols(self._form.before_key + _ITEM + self._form.behind_key)} "
            item += self._nested(_ITEM, schema["items"], depth + 1)
            most = _count(schema, "maxItems")
            bounds = f"{{{_count(schema, 'minItems') or 0},{'' if most is None else most}}}"
            return f"{self._rule(item)}{bounds} {self._symbols(end)}"
        if schema.get("type") == "object" and not schema.keys() - _OF_OBJECTS and "properties" in schema:
            inside = self._members(
                schema,
                lambda name, one: (
                    f"{self._symbols(self._form.before_key + name + self._form.behind_key)} "
                    f"{self._nested(name, one, depth + 1)}"
                ),
                depth,
            )
            return f"{inside} {self._symbols(end)}"
        return f"{self._json(schema)} {self._symbols(end)}"

    def _bare(self, schema: Any, depth: int) -> str:
        """Write Gemma's values: own quotes, bare keys."""
        schema = self._local(schema)
        if (parts := self._alternatives(schema, depth, self._bare)) is not None:
            return parts
        if (choices := _choices(schema)) is not None and not schema.keys() - _OF_TEXT:
            return self._rule(" | ".join(map(self._choice, choices)))
        given = _type(schema)
        if given == "string":
            return f"{self._symbols(self._form.quote)} {self._text(schema, self._form.quote)}"
        if given == "array" and not schema.keys() - _OF_ARRAYS and isinstance(schema.get("items"), dict):
            return self._array(schema, self._bare(schema["items"], depth + 1), ",")
        if given == "object" and not schema.keys() - _OF_OBJECTS:
            inside = self._members(schema, lambda key, one: f'"{key}:" {self._bare(one, depth + 1)}', depth)
            return self._rule(f'"{{" {inside} "}}"')
        if given in _SCALARS:
            return self._json(schema)
        raise UnsuitableError("value")

    def _python(self, schema: Any, depth: int) -> str:
        """Write Python literals, or JSON, which is read too."""
        try:
            return self._python_literal(self._local(schema), depth)
        except UnsuitableError:
            return self._json(schema)

    def _python_literal(self, schema: dict[str, Any], depth: int) -> str:
        if (parts := self._alternatives(schema, depth, self._python)) is not None:
            return parts
        if (choices := _choices(schema)) is not None and not schema.keys() - _OF_TEXT:
            return self._rule(" | ".join(_literal(text) for one in choices for text in _spelled(one)))
        given = _type(schema)
        if given in _PYTHON_WORDS and not schema.keys() - _TYPED:
            return _PYTHON_WORDS[given]
        if given == "string" and not schema.keys() - _OF_TEXT:
            bounds = _bounds(schema)
            return self._rule(
                " | ".join(_QUOTED.replace("Q", quote) + bounds + quote + "/" for quote in "'\""), is_terminal=True
            )
        if given == "array" and not schema.keys() - _OF_ARRAYS and isinstance(schema.get("items"), dict):
            return self._array(schema, self._python(schema["items"], depth + 1), ", ")
        if given == "object" and not schema.keys() - _OF_OBJECTS:
            inside = self._members(
                schema, lambda key, one: f'("\'{key}\': " | "\\"{key}\\": ") {self._python(one, depth + 1)}', depth
            )
            return self._rule(f'"{{" {inside} "}}"')
        return self._json(schema)

    def _alternatives(self, schema: dict[str, Any], depth: int, value: Callable[[Any, int], str]) -> str | None:
        """Write one of several schemas or types, if it has them."""
        if depth > _MAX_DEPTH:
            raise UnsuitableError("depth")
        if (branches := self._branches(schema)) is not None:
            return self._rule(" | ".join(value(one, depth + 1) for one in branches))
        given = schema.get("type")
        if given and isinstance(given, list) and _choices(schema) is None:
            return self._rule(" | ".join(value({**schema, "type": one}, depth + 1) for one in given))
        return None

    def _branches(self, schema: dict[str, Any]) -> list[Any] | None:
        """Return branches, if a schema has only them."""
        keyword = next((one for one in ("anyOf", "oneOf") if one in schema), "")
        branches = schema.get(keyword)
        if not branches or not isinstance(branches, list) or schema.keys() - _NOTES - {keyword}:
            return None
        return branches if keyword == "anyOf" or exclude_each_other(branches, self._root) else None

    def _choice(self, value: Any) -> str:
        if isinstance(value, str) and value and self._form.quote not in value:
            quote = self._symbols(self._form.quote)
            return f"{quote} {_literal(value)} {quote}"
        if isinstance(value, str | list | dict):
            raise UnsuitableError("choice")
        return _literal(json.dumps(value))

    def _array(self, schema: dict[str, Any], item: str, between: str) -> str:
        item = self._rule(item)
        least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if most == 0:
            return '"[]"'
        more = f'("{between}" {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return self._rule(f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')

    def _json(self, schema: Any) -> str:
        schema = schema if isinstance(schema, dict) else {}
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        whole = {**schema, **shared}
        if schema.keys() & shared.keys() or _FAR_REFERENCE.search(json.dumps(whole)):
            raise UnsuitableError("reference")
        self.schemas.append(whole)
        return f"@tool_{len(self.schemas) - 1}"

    def _is_plain(self, schema: Any) -> bool:
        """Whether its scalars fit by type alone."""
        schema = self._local(schema)
        kinds = schema.get("anyOf")
        if isinstance(kinds, list) and not schema.keys() - _NOTES - {"anyOf"}:
            return all(self._is_plain(one) for one in kinds)
        given = schema.get("type")
        types = [given] if isinstance(given, str) else given
        if schema.keys() - _TYPED or not isinstance(types, list):
            return False
        return all(isinstance(one, str) and one in _SCALARS for one in types)

    def _local(self, schema: Any) -> dict[str, Any]:
        found = resolved(schema, self._root)
        if not isinstance(found, dict):
            raise UnsuitableError("schema")
        return found

    def _symbols(self, text: str) -> str:
        return symbols(text, self._markers)

    def _rule(self, body: str, *, is_terminal: bool = False) -> str:
        name = f"{'X' if is_terminal else 'x'}{len(self.rules)}"
        self.rules.append(f"{name}: {body.strip() or _EMPTY}")
        return name


_EMPTY = '""'


def _choices(schema: dict[str, Any]) -> Sequence[Any] | None:
    """Return listed values that fit. Raises UnsuitableError without any."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(choices, list):
        return None
    if not (fitting := [one for one in choices if _fits(one, schema)]):
        raise UnsuitableError("choices")
    return fitting


def _fits(choice: Any, schema: dict[str, Any]) -> bool:
    given = schema.get("type")
    types, kinds = [given] if isinstance(given, str) else given, list(types_in({"const": choice}, {}))
    if isinstance(types, list) and not any(one in kinds for one in types):
        return False
    if "const" in schema and isinstance(schema.get("enum"), list) and choice not in schema["enum"]:
        return False
    least, most = _count(schema, "minLength") or 0, _count(schema, "maxLength")
    return not isinstance(choice, str) or (least <= len(choice) and (most is None or len(choice) <= most))


def _type(schema: dict[str, Any]) -> str:
    """Raises UnsuitableError for what is no type."""
    given = schema.get("type", "")
    if not isinstance(given, str):
        raise UnsuitableError("type")
    return given


def _count(schema: dict[str, Any], keyword: str) -> int | None:
    """Return a number of characters or items for a rule."""
    number = schema.get(keyword)
    if number is not None and (type(number) is not int or not 0 <= number <= _LARGEST_COUNT):
        raise UnsuitableError(keyword)
    return number


def _bounds(schema: dict[str, Any]) -> str:
    """Return a regex' bounds of a text's length."""
    most = _count(schema, "maxLength")
    return f"{{{_count(schema, 'minLength') or 0},{'' if most is None else most}}}"


def _spelled(choice: Any) -> list[str]:
    """Spell a literal as Python, in both quotes."""
    if isinstance(choice, list | dict):
        raise UnsuitableError("choice")
    if not isinstance(choice, str):
        return [repr(choice)]
    quoted = json.dumps(choice, ensure_ascii=False)
    return [quoted] if "'" in choice or '"' in choice else [quoted, f"'{quoted[1:-1]}'"]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """Return a format's text as a regex between slashes."""
    escaped = re.sub(r"[\\/.+*?()|\[\]{}^$#&~-]", lambda found: "\\" + found[0], text).replace("\n", "\\n")
    return escaped.replace(SPACE, "[ \\n\\t]*")
