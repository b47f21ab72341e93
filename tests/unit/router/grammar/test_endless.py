"""What ends of schemas that refer to each other: against all values that there are, and in steps that are counted."""

from __future__ import annotations

import json
import random
from itertools import product
from typing import Any

import pytest

from router.grammar.closed_schema import close_objects
from router.grammar.endless import _JOINT_STEPS, Ends

Schemas = dict[str, Any]
NULL = {"type": "null"}


def to(name: object) -> Schemas:
    return {"$ref": f"#/$defs/{name}"}


def holding(*schemas: Schemas) -> Schemas:
    properties = dict(zip("abcdefgh", schemas, strict=False))
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def asked(named: Schemas) -> tuple[str | None, int]:
    """Return the schema said to have no end, and the steps taken."""
    ends = Ends(lambda schema: named.get(schema["$ref"].rpartition("/")[2]) if "$ref" in schema else None)
    return ends.endless(named), ends.num_steps


def fault_of(named: Schemas) -> str:
    with pytest.raises(ValueError, match="without end") as error:
        close_objects({"type": "array", "items": to(next(iter(named))), "$defs": named})
    return str(error.value)


class Values:
    """All values of null, and of lists and objects of at most two, as far as schemas tell them apart."""

    def __init__(self, named: Schemas) -> None:
        self._named = named
        self.values: list[Any] = []
        known: set[tuple[str, ...]] = set()
        parts: list[Schemas] = []
        waiting: list[Any] = list(named.values())
        while waiting:
            part = waiting.pop()
            inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
            waiting += inner
            parts += [part] if isinstance(part, dict) else []
        while True:
            num_known = len(known)
            for value in self._next():
                kind = (
                    type(value).__name__,
                    str(len(value or "")),
                    *(value if isinstance(value, dict) else ()),
                )
                key = (*kind, *(str(number) for number, part in enumerate(parts) if self.fits(value, part)))
                if key not in known:
                    known.add(key)
                    self.values.append(value)
            if len(known) == num_known:
                return

    def _next(self) -> list[Any]:
        lists = [list(items) for length in range(3) for items in product(self.values, repeat=length)]
        objects = [dict(zip(keys, items, strict=True)) for keys in ("", "a", "b", "ab")
                   for items in product(self.values, repeat=len(keys))]  # fmt: skip
        return [None, *lists, *objects]

    def fits(self, value: Any, schema: Any, above: tuple[int, ...] = ()) -> bool:
        """What is asked about the same value on the way to its own answer does not fit."""
        if not isinstance(schema, dict) or id(schema) in above:
            return schema is True
        above = (*above, id(schema))
        kind = "null" if value is None else "array" if isinstance(value, list) else "object"
        if "$ref" in schema and not self.fits(value, self._named[schema["$ref"].rpartition("/")[2]], above):
            return False
        if not all(self.fits(value, one, above) for one in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(self.fits(value, one, above) for one in schema["anyOf"]):
            return False
        if schema.get("type", kind) != kind:
            return False
        if kind == "array":
            first = schema.get("prefixItems", [])
            items = [*first, *[schema.get("items", True)] * 2]
            is_long = len(value) >= schema.get("minItems", 0)
            return is_long and all(self.fits(one, inner) for one, inner in zip(value, items, strict=False))
        if kind == "null":
            return True
        members, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return (
            len(value) >= schema.get("minProperties", 0)
            and all(key in value for key in schema.get("required", ()))
            and all(self.fits(one, members.get(key, others)) for key, one in value.items())
        )


def a_schema(chance: random.Random, names: range, depth: int, *, has_parts: bool) -> Schemas:
    def inner() -> Schemas:
        return a_schema(chance, names, depth - 1, has_parts=has_parts)

    forms = ["ref", "ref", "ref", "null"]
    forms += ["any", "object", "object", "list", "first", "open"] if depth else []
    form = chance.choice([*forms, "all", "beside", "choice"] if depth and has_parts else forms)
    if form == "ref":
        return to(chance.choice(names))
    if form == "any":
        return {"anyOf": [inner(), inner()]}
    if form == "all":
        return {"allOf": [inner(), inner()]}
    if form == "beside":
        return to(chance.choice(names)) | {"type": "object", "required": ["a"]}
    if form == "choice":
        return {"type": "object", "properties": {"a": inner()}, "anyOf": [{"required": ["a"]}, inner()]}
    if form == "object":
        return {"type": "object", "properties": {"a": inner(), "b": inner()}, "additionalProperties": False,
                "required": chance.choice([["a"], ["a", "b"]])}  # fmt: skip
    if form == "list":
        return {"type": "array", "items": inner(), "minItems": chance.choice([0, 1, 2])}
    if form == "first":
        return {"type": "array", "prefixItems": [inner()], "items": inner(), "minItems": chance.choice([1, 2])}
    if form == "open":
        return {"type": "object", "properties": {"a": inner()}, "additionalProperties": inner(), "minProperties": 1}
    return dict(NULL)


@pytest.mark.parametrize("has_parts", [False, True])
def test_as_all_values_say(has_parts: bool) -> None:
    """Where schemas meet, some that have no end are served; none is refused that has one."""
    chance, num_refused, num_served = random.Random(7), 0, 0
    for _ in range(150):
        names = range(chance.choice([1, 2, 3]))
        named = {str(name): a_schema(chance, names, 2, has_parts=has_parts) for name in names}
        values = Values(named)
        endless = [name for name, one in named.items() if not any(values.fits(value, one) for value in values.values)]
        found, _ = asked(named)
        assert found in endless if found is not None else has_parts or not endless, json.dumps(named)
        num_refused, num_served = num_refused + (found is not None), num_served + (found is None)
    assert min(num_refused, num_served) > 20


def three_ways(chance: random.Random, num: int, ends: tuple[int, ...] = ()) -> Schemas:
    def objects() -> list[Schemas]:
        return [holding(*(to(f"d{chance.randrange(num)}") for _ in "ab")) for _ in range(3)]

    return {f"d{one}": NULL if one in ends else {"anyOf": objects()} for one in range(num)}


def test_choices_among_many_are_refused() -> None:
    for num in (16, 24, 60):
        assert "#/$defs/d" in fault_of(three_ways(random.Random(num), num))
    two = {f"d{one}": {"anyOf": [holding(to(f"d{(one * 7 + 1) % 60}")), holding(to(f"d{(one * 11 + 3) % 60}"))]}
           for one in range(60)}  # fmt: skip
    assert "#/$defs/d" in fault_of(two)


def test_steps_grow_with_the_schema() -> None:
    for num in (40, 80, 160):
        found, num_steps = asked(three_ways(random.Random(num), num, ends=(0, 1)))
        assert num_steps < 200 * num, found
    all_of_all = {str(one): holding(*(to(other) for other in range(5))) for one in range(5)}
    found, num_steps = asked(all_of_all)
    assert found == "0" and num_steps < 2_000


def test_schemas_that_meet_in_ever_other_ways_are_asked_about_alone_at_last() -> None:
    def part(one: int) -> Schemas:
        return {"allOf": [to(f"d{(one * step + 1) % 60}") for step in (2, 3)], "properties": {"a": to(f"d{one}")}}

    meeting = {
        f"d{one}": {"type": "object", "required": ["a"], "anyOf": [part(one * 5 % 60), part(one * 7 % 60), NULL]}
        for one in range(60)
    }
    found, num_steps = asked(meeting | {"x": holding(to("x"))})
    assert found is not None and _JOINT_STEPS < num_steps < 60_000


def test_a_chain_of_references_is_no_nesting() -> None:
    chain = {f"d{one}": to(f"d{one + 1}") for one in range(400)}
    close_objects({"type": "array", "items": to("d0"), "$defs": chain | {"d400": NULL}})
    assert "#/$defs/d" in fault_of(chain | {"d400": to("d0")})
    found, num_steps = asked({f"d{one}": to(f"d{one + 1}") for one in range(5000)} | {"d5000": NULL})
    assert found is None and num_steps < 60_000
