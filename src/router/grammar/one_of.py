"""Branches of `oneOf`: enforced where no value fits two, as JSON Schema reads them."""

# llguidance compares branches as they are closed, and not behind references. Closing narrows an object: what is written
# for one branch must not fit another as its author wrote it, open, or without a type.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from router.grammar.endless import Ends
from router.grammar.references import ROOT, step
from router.grammar.unfit import Joint, are_told_by_a_key

_MOST_REFERENCES = 16
_DATA = frozenset({"const", "enum", "default", "examples"})
_APART = frozenset({"$defs", "definitions"})
"""Only references lead there."""
OVERLAP = "a `oneOf` whose branches overlap cannot be enforced: use `anyOf`, or branches that exclude each other"
_OPEN = (
    "the branches of a `oneOf` exclude each other only where objects are closed and have their `type`: say `type`, and "
    "`additionalProperties: false` or `required` keys, or use `anyOf`"
)
_TOO_MANY = (
    "the branches of a `oneOf` are too many to compare: give each a required key with a `const` of its own, "
    "or use `anyOf`"
)


@dataclass
class Branches:
    """Schemas by their paths, written and closed."""

    is_alone: bool
    """Whether nothing beside a `$ref` counts, as before 2019."""
    _written: dict[str, Any] = field(default_factory=dict)
    _closed: dict[str, Any] = field(default_factory=dict)
    # Closed and written, by the identity of the closed one.
    _pairs: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    # What a `$ref` names, by the identity of its schema: whether as closed, and where.
    _targets: dict[int, tuple[bool, str]] = field(default_factory=dict)
    # Closed schemas that a `$ref` names, by identity: they hold elsewhere, too.
    _named: set[int] = field(default_factory=set)

    def add(self, path: str, written: Any, closed: Any, target: str | None = None) -> None:
        """Note a schema, and the path that its `$ref` names."""
        self._written[path], self._closed[path] = written, closed
        self._pairs[id(closed)] = closed, written
        if target is not None:
            self._targets[id(written)], self._targets[id(closed)] = (False, target), (True, target)

    def enforce(self, path: str) -> None:
        """Write each `oneOf` reached from a path as `anyOf`.

        Raises:
            ValueError: A value may fit two branches.
        """
        joint, seen, reached = Joint(self._target, is_alone=self.is_alone), {path}, [path]
        self._named = {id(self._closed.get(target)) for _, target in self._targets.values()}
        while reached:
            for target in self._enforced(self._closed[reached.pop()], (), joint):
                if target not in seen:
                    seen.add(target)
                    reached.append(target)
        self._check_ends(seen)

    def _check_ends(self, reached: set[str]) -> None:
        """Refuse what a `$ref` names where no value has an end."""
        targets = dict.fromkeys(path for _, path in self._targets.values() if path in reached)
        ends = Ends(self._target, is_alone=self.is_alone)
        path = ends.endless({path: self._closed.get(path, True) for path in targets})
        if path is not None:
            raise ValueError(f"{path}: no value that fits has an end, since a `$ref` leads to itself without end")

    def _target(self, schema: dict[str, Any]) -> Any:
        is_closed, path = self._targets.get(id(schema), (False, ""))
        return (self._closed if is_closed else self._written).get(path) if path else None

    def _enforced(self, value: Any, context: tuple[Any, ...], joint: Joint) -> list[str]:
        """Enforce a closed schema's own, and return the paths that it names.

        Args:
            context: Closed schemas that the same values fit.
        """
        targets: list[str] = []
        if isinstance(value, list):
            for one in value:
                targets += self._enforced(one, (), joint)
        if not isinstance(value, dict):
            return targets
        beside = () if id(value) in self._named else context
        context = (*beside, value) if id(value) in self._pairs else ()
        if id(value) in self._targets:
            targets.append(self._targets[id(value)][1])
        branches = value.get("oneOf")
        if context and isinstance(branches, list):
            if fault := self._fault(branches, context, joint):
                raise ValueError(f"{self._pointer(value)}{fault}")
            self._choose(value)
        for keyword, inner in value.items():
            if keyword in ("allOf", "anyOf") and isinstance(inner, list):
                for one in inner:
                    targets += self._enforced(one, context, joint)
            elif not context or keyword not in _DATA | _APART:
                targets += self._enforced(inner, (), joint)
        return targets

    def _fault(self, branches: list[Any], context: tuple[Any, ...], joint: Joint) -> str | None:
        if are_told_by_a_key([self._resolved(one) for one in branches]):
            return None
        for number, branch in enumerate(branches):
            for other in (one for place, one in enumerate(branches) if place != number):
                if joint.fits_nothing([branch, self._pairs.get(id(other), (other, other))[1]], context):
                    continue
                is_closing = joint.fits_nothing([branch, other], context)
                return _TOO_MANY if joint.is_tired else _OPEN if is_closing else OVERLAP
        return None

    def _pointer(self, closed: dict[str, Any]) -> str:
        """Return where the client wrote the branches of a closed schema, before a sentence about them."""
        branches, waiting = self._pairs[id(closed)][1]["oneOf"], [(ROOT, self._written[ROOT])]
        while waiting:
            path, value = waiting.pop()
            if value is branches:
                return f"{path}: "
            inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            waiting += [(step(path, name), one) for name, one in inner]
        return ""

    def _resolved(self, branch: Any) -> tuple[Any, Any]:
        """Return a branch, or what its `$ref` leads to, closed and as written."""
        for _ in range(_MOST_REFERENCES):
            target = self._target(branch) if isinstance(branch, dict) else None
            if target is None:
                break
            branch = target
        return self._pairs.get(id(branch), (branch, branch))

    def _choose(self, schema: dict[str, Any]) -> None:
        """Put `anyOf` where `oneOf` is."""
        branches, parts = schema["oneOf"], schema.get("allOf", [])
        if "anyOf" not in schema:
            # Keys are written in the order in which a schema names them.
            items = [("anyOf" if keyword == "oneOf" else keyword, value) for keyword, value in schema.items()]
            schema.clear()
            schema.update(items)
            return
        if not isinstance(parts, list):
            raise ValueError("`allOf` is not a list of schemas")
        chosen = {"anyOf": branches}
        self._pairs[id(chosen)] = chosen, chosen
        del schema["oneOf"]
        schema["allOf"] = [*parts, chosen]
