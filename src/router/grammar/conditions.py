"""Keywords that llguidance does not know, written with those that it enforces where that can be done exactly.

`not`, `if` with `then` and `else`, `dependentSchemas`, `contains`, and `unevaluatedProperties` of an object that has no
other parts. What is left is refused by name when the schema is compiled.
"""

from __future__ import annotations

from typing import Any

from router.grammar.negated import negated

WORDS = frozenset({"not", "if", "then", "else", "dependentSchemas", "contains", "unevaluatedProperties"})
_FIRST_ITEMS = 8
"""Places at which an array without `maxItems` may have the item that it must contain."""
_APPLICATORS = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}
)  # fmt: skip
_NAMING = ("properties", "required")
_JOINING = ("allOf", "anyOf", "oneOf")


def without_conditions(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose own keywords of `WORDS` are replaced, as far as they can be."""
    if WORDS.isdisjoint(schema):
        return schema
    rest, added = dict(schema), []
    _close_unevaluated(rest)
    for keyword, replaced in (
        ("not", _excluded), ("if", _decided), ("dependentSchemas", _depending), ("contains", _containing),
    ):  # fmt: skip
        part = replaced(schema) if keyword in schema else None
        if part is not None:
            added.append(part)
            for name in ("if", "then", "else") if keyword == "if" else (keyword,):
                rest.pop(name, None)
    added = [part for part in added if part is not True]
    if not added:
        return rest
    others = rest.get("allOf", [])
    return rest | {"allOf": [*others, *added]} if isinstance(others, list) else schema


def named_keys(schema: Any) -> set[str] | None:
    """Return the keys that a schema names for the object itself; None: it may name others."""
    if not isinstance(schema, dict):
        return set()
    if "$ref" in schema or "$dynamicRef" in schema or "patternProperties" in schema:
        return None
    found = {name for keyword in _NAMING for name in schema.get(keyword, ()) if isinstance(name, str)}
    for keyword in _JOINING:
        for one in schema.get(keyword, ()) if isinstance(schema.get(keyword), list) else ():
            keys = named_keys(one)
            if keys is None:
                return None
            found |= keys
    return found if WORDS.isdisjoint(schema) else None


def _close_unevaluated(rest: dict[str, Any]) -> None:
    """Close an object without other parts: what it does not evaluate is what it does not name."""
    if rest.get("unevaluatedProperties", True) not in (True, {}) and _APPLICATORS.isdisjoint(rest):
        unevaluated = rest.pop("unevaluatedProperties")
        rest.setdefault("additionalProperties", unevaluated)


def _excluded(schema: dict[str, Any]) -> Any:
    return negated(schema["not"])


def _decided(schema: dict[str, Any]) -> Any:
    """Return a choice: what is asked fits, and `then`; or it does not, and `else`."""
    asked = schema["if"]
    if "then" not in schema and "else" not in schema:
        return True
    other = negated(asked)
    if other is None:
        return None
    branches = [
        {"allOf": [condition, schema[branch]]} if branch in schema else condition
        for condition, branch in ((asked, "then"), (other, "else"))
        if condition is not False
    ]
    return {"anyOf": branches}


def _depending(schema: dict[str, Any]) -> Any:
    """Let each of the keys be absent, or its schema fit."""
    depending = schema["dependentSchemas"]
    if not isinstance(depending, dict):
        return None
    choices = [
        {"anyOf": [{"properties": {key: False}, "additionalProperties": True}, {"allOf": [{"required": [key]}, one]}]}
        for key, one in depending.items()
    ]
    return {"allOf": choices} if choices else True


def _containing(schema: dict[str, Any]) -> Any:
    """Put the item that an array must contain at each of its places in turn."""
    most, first = schema.get("maxItems", _FIRST_ITEMS), schema.get("prefixItems", [])
    if schema.get("type") != "array" or "minContains" in schema or "maxContains" in schema:
        return None
    if not isinstance(first, list) or not isinstance(most, int) or isinstance(most, bool):
        return None
    wanted, items = schema["contains"], schema.get("items", True)
    if isinstance(items, list):
        return None
    choices = []
    for place in range(min(most, _FIRST_ITEMS)):
        before = [*first[:place], *[items] * (place - len(first))]
        own = first[place] if place < len(first) else items
        if own is False or False in before:
            break
        fitting = wanted if own is True else {"allOf": [own, wanted]}
        choices.append(
            {"type": "array", "prefixItems": [*before, fitting, *first[place + 1 :]], "items": items,
             "minItems": place + 1}
        )  # fmt: skip
    return {"anyOf": choices} if choices else False
