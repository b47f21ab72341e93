"""Branches of `oneOf` that exclude each other by a type of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from router.grammar.references import step


@dataclass
class Branches:
    """Closed schemas by their paths."""

    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Where the type is ours.
    taken: set[str] = field(default_factory=set)
    # What references lead to, by where they are.
    targets: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError where another branch fits other values."""
        if not self.taken:
            return
        for path, schema in self.schemas.items():
            branches = self._parts(path, schema, "oneOf")
            if any(self._is_taken(one, set()) for one in branches) and not all(map(self._is_object, branches)):
                text = "a branch of `oneOf` with `properties` needs its `type`: without one it fits what is no object"
                raise ValueError(f"{text}, as another branch does")

    def _is_taken(self, path: str, seen: set[str]) -> bool:
        """Say whether a type is ours."""
        schema = self.schemas.get(path)
        if schema is None or path in seen:
            return False
        seen.add(path)
        parts = [one for keyword in ("allOf", "anyOf", "oneOf") for one in self._parts(path, schema, keyword)]
        parts += [self.targets[path]] if path in self.targets else []
        return path in self.taken or any(self._is_taken(one, seen) for one in parts)

    def _is_object(self, path: str, depth: int = 8) -> bool:
        """Say whether only objects fit."""
        schema = self.schemas.get(path)
        if schema is None or not depth:
            return False
        if schema.get("type") == "object" or self._is_object(self.targets.get(path, ""), depth - 1):
            return True
        every = [self._parts(path, schema, keyword) for keyword in ("anyOf", "oneOf")]
        return any(self._is_object(one, depth - 1) for one in self._parts(path, schema, "allOf")) or any(
            branches and all(self._is_object(one, depth - 1) for one in branches) for branches in every
        )

    def _parts(self, path: str, schema: dict[str, Any], keyword: str) -> list[str]:
        parts = schema.get(keyword)
        return [step(path, keyword, number) for number in range(len(parts))] if isinstance(parts, list) else []
