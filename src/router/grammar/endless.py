"""Whether JSON schemas have values that end, where they refer to themselves."""

# Questions are about the schemas that a value fits together. All are collected with what their answers depend on, and
# are answered no until others make them yes, each once: what then is no has no value that ends. Asked the other way,
# from yes, the answers show what has no value at all.
#
# Schemas that meet in ever other ways would make ever more questions: after some steps a question is about one schema
# alone, and their number grows with the schema's. Then a value may be said to end that does not; never the reverse.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.grammar.unfit import (
    Joint,
    first_items,
    is_without_room,
    item_of,
    kinds_of,
    list_of,
    member_of,
    members_of,
    needs_members,
    num_least_places,
    required_keys,
)

_JOINT_STEPS = 5_000
_CHOICES = ("anyOf", "oneOf")
_SILENT = frozenset({"$ref", "$defs", "definitions", "allOf", *_CHOICES, "title", "description"})
"""Keywords that say nothing themselves of a value."""

Clauses = list[list[int]]
"""Of each list of questions one must be answered yes."""


@dataclass
class _Question:
    schemas: list[Any]
    # Schemas that the value fits, too, whose branches and references are asked about elsewhere.
    context: list[dict[str, Any]]
    clauses: Clauses = field(default_factory=list)
    # Of the value's kinds, one of which must do.
    kinds: list[Clauses] = field(default_factory=list)

    def failing(self, answers: Sequence[bool], hopes: Sequence[bool] | None = None) -> list[int] | None:
        """Return the first questions because of which the answer is no; None: it is yes.

        Args:
            hopes: Answers that a kind must do by, to be the one that fails.
        """
        for clause in self.clauses:
            if not any(answers[one] for one in clause):
                return clause
        found: list[int] = []
        for kind in self.kinds:
            failing = [clause for clause in kind if not any(answers[one] for one in clause)]
            if not failing:
                return None
            if hopes is not None and all(any(hopes[one] for one in clause) for clause in kind):
                found = failing[0]
        return found


class Ends:
    """What ends of schemas that refer to each other.

    Args:
        target: What a schema's `$ref` leads to; None: it has none.
        is_alone: Whether nothing beside a `$ref` counts.
    """

    def __init__(self, target: Callable[[dict[str, Any]], Any], *, is_alone: bool = False) -> None:
        self.num_steps = 0
        self._target, self._is_alone = target, is_alone
        self._joint = Joint(target, is_alone=is_alone)
        self._joint.num_left = _JOINT_STEPS
        # In the order in which they are asked, and their numbers by the identities of context and schemas.
        self._questions: list[_Question] = []
        self._numbers: dict[tuple[frozenset[int], frozenset[int]], int] = {}

    def endless(self, schemas: Mapping[str, Any]) -> str | None:
        """Return the name of a schema that leads to itself and has values, none of which ends; None: there is none."""
        asked = {path: self._ask([schema]) for path, schema in schemas.items()}
        place = 0
        while place < len(self._questions):
            self._explore(self._questions[place])
            place += 1
        ends, exists = self._answered(at_first=False), self._answered(at_first=True)
        first = next((path for path, number in asked.items() if exists[number] and not ends[number]), None)
        if first is None:
            return None
        loop = self._loop(asked[first], ends, exists)
        return next((path for path, number in asked.items() if number in loop), first)

    def _loop(self, number: int, ends: Sequence[bool], exists: Sequence[bool]) -> set[int]:
        """Return questions that each have no end because of the next, round and round."""
        way: dict[int, None] = {}
        while number not in way:
            way[number] = None
            failing = self._questions[number].failing(ends, exists) or ()
            number = next((one for one in failing if exists[one]), number)
        numbers = list(way)
        return set(numbers[numbers.index(number) :])

    def _answered(self, *, at_first: bool) -> list[bool]:
        """Answer all questions, changing the first answers only where others make that necessary."""
        answers = [at_first] * len(self._questions)
        asking: list[list[int]] = [[] for _ in answers]
        for number, question in enumerate(self._questions):
            for clause in (*question.clauses, *(clause for kind in question.kinds for clause in kind)):
                for one in clause:
                    asking[one].append(number)
        # What was asked last comes first: others wait for it. None waits twice.
        waiting = dict.fromkeys(reversed(range(len(answers))))
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            question = self._questions[number]
            self.num_steps += 1 + len(question.clauses) + sum(map(len, question.kinds))
            if answers[number] is at_first and (question.failing(answers) is None) is not at_first:
                answers[number] = not at_first
                waiting |= dict.fromkeys(asking[number])
        return answers

    @property
    def _is_joint(self) -> bool:
        """Whether questions may still be about several schemas."""
        return self.num_steps < _JOINT_STEPS

    def _ask(self, schemas: list[Any], context: Iterable[dict[str, Any]] = ()) -> int:
        """Return the number of a question."""
        given = [one for one in context if not one.keys() <= _SILENT] if self._is_joint else []
        key = frozenset(map(id, given)), frozenset(map(id, schemas))
        if key not in self._numbers:
            self._numbers[key] = len(self._questions)
            self._questions.append(_Question(schemas, given))
        return self._numbers[key]

    def _together(self, schemas: Iterable[Any]) -> Clauses:
        """Ask about a value that fits all schemas."""
        told = list({id(one): one for one in schemas if one is False or (isinstance(one, dict) and one)}.values())
        return [[self._ask(one)] for one in ([told] if self._is_joint else [[one] for one in told]) if one]

    def _explore(self, question: _Question) -> None:
        """Find out what the answer depends on."""
        self.num_steps += len(question.context)
        plain, choices, targets = list(question.context), [], []
        waiting, seen = [(schema, True) for schema in question.schemas], set[int]()
        while waiting:
            schema, is_own = waiting.pop()
            self.num_steps += 1
            if schema is False:
                return
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            target = self._target(schema)
            if target is not None:
                targets += [target] if is_own else []
                waiting += [(target, False)] if self._is_joint else []
            if target is None or not self._is_alone:
                plain.append(schema)
                waiting += [(one, is_own) for one in list_of(schema, "allOf")]
                choices += [schema[keyword] for keyword in _CHOICES if list_of(schema, keyword)]
        plain = list({id(one): one for one in plain}.values())
        # A schema that is a part of itself is asked about on the way to its own answer.
        question.clauses = [[self._ask([one])] for one in targets]
        question.clauses += [[self._ask([one], plain) for one in branches] for branches in choices]
        question.kinds = self._kinds(plain)

    def _kinds(self, plain: list[dict[str, Any]]) -> list[Clauses]:
        if (is_without := self._joint.lists_nothing(plain)) is not None:
            return [] if is_without else [[]]
        kinds = {kind for kind in kinds_of(plain) if not is_without_room(kind, plain)}
        found: list[Clauses] = [[]] if kinds - {"array", "object"} else []
        for kind, parts in (("array", self._items), ("object", self._members)):
            if kind in kinds and [] not in found and (clauses := parts(plain)) is not None:
                found.append(clauses)
        return [[]] if [] in found else found

    def _items(self, plain: list[dict[str, Any]]) -> Clauses:
        self.num_steps += sum(len(first_items(schema)) for schema in plain)
        places = range(num_least_places(plain))
        return [one for place in places for one in self._together(item_of(schema, place) for schema in plain)]

    def _members(self, plain: list[dict[str, Any]]) -> Clauses | None:
        """Ask about an object's members in any case; None: it cannot have so many."""
        required = required_keys(plain)
        self.num_steps += len(required) * len(plain)
        if is_without_room("object", [*plain, {"minProperties": len(required)}]):
            return None
        clauses = [one for key in required for one in self._together(member_of(schema, key) for schema in plain)]
        for schema in plain if needs_members(plain) else ():
            # Where a schema leaves some keys open, a member may have one of those.
            if all(isinstance(one, dict) or one is False for one in members_of(schema)):
                clauses.append([self._ask([one]) for one in members_of(schema)])
        return clauses
