"""Other forms of chats that templates (and transformers) refuse, but clients send: null content, late or double system
messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, takewhile
from typing import Any

from router.template.messages import Turn

_Change = Callable[[Sequence[Turn]], list[Turn] | None]
"""None: the chat has nothing to change."""
_INSTRUCTIONS = frozenset({"system", "developer"})


def other_forms(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Yield forms, fewest changes first."""
    possible = [change for change in (_with_texts, _with_written_arguments) if change(turns) is not None]
    systems: list[_Change | None] = [None, *(one for one in _SYSTEMS if one(turns) is not None)]
    for move in systems:
        moved = turns if move is None else move(turns) or turns
        for number in range(len(possible) + 1):
            for changes in combinations(possible, number):
                form = list(moved)
                for change in changes:
                    form = change(form) or form
                if number or move is not None:
                    yield form


def fault_in(turns: Sequence[Turn]) -> str | None:
    """Return what no form changes: arguments that are not an object."""
    for index, turn in enumerate(turns):
        for number, call in enumerate(turn.tool_calls or ()):
            if not isinstance(call["function"]["arguments"], dict):
                place = f"messages[{index}].tool_calls[{number}].function.arguments"
                return f"`{place}` must be the JSON text of an object"
    return None


def _with_texts(turns: Sequence[Turn]) -> list[Turn] | None:
    """Put empty texts beside calls."""
    if not any(turn.parts is None and turn.tool_calls for turn in turns):
        return None
    return [replace(turn, parts="") if turn.parts is None and turn.tool_calls else turn for turn in turns]


def _with_written_arguments(turns: Sequence[Turn]) -> list[Turn] | None:
    """Write arguments as OpenAI's text."""
    if not any(turn.tool_calls for turn in turns):
        return None
    return [replace(turn, tool_calls=[_written(call) for call in turn.tool_calls or ()] or None) for turn in turns]


def _written(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = function["arguments"]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _merged(turns: Sequence[Turn]) -> list[Turn] | None:
    """The leading system messages as one."""
    leading = list(takewhile(_instructs, turns))
    return [_joined(leading), *turns[len(leading) :]] if len(leading) > 1 else None


def _hoisted(turns: Sequence[Turn]) -> list[Turn] | None:
    """Join system messages at the beginning."""
    found = [turn for turn in turns if _instructs(turn)]
    num_leading = len(list(takewhile(_instructs, turns)))
    if len(found) == num_leading or len(found) == len(turns):
        return None
    return [_joined(found), *(turn for turn in turns if not _instructs(turn))]


def _in_a_question(turns: Sequence[Turn]) -> list[Turn] | None:
    """Put system messages before the first question."""
    found = [turn for turn in turns if _instructs(turn)]
    others = [turn for turn in turns if not _instructs(turn)]
    if not found:
        return None
    if not others or others[0].role != "user":
        return [replace(_joined(found), role="user"), *others]
    return [replace(_joined([*found, others[0]]), role="user", name=others[0].name), *others[1:]]


_SYSTEMS: tuple[_Change, ...] = (_merged, _hoisted, _in_a_question)


def _instructs(turn: Turn) -> bool:
    return turn.role in _INSTRUCTIONS


def _joined(turns: Sequence[Turn]) -> Turn:
    if not any(isinstance(turn.parts, list) for turn in turns):
        return replace(turns[0], parts="\n\n".join(filter(None, (turn.text for turn in turns))))
    parts: list[dict[str, Any]] = []
    for turn in turns:
        if parts:
            parts.append({"type": "text", "text": "\n\n"})
        parts += turn.parts if isinstance(turn.parts, list) else [{"type": "text", "text": turn.text}]
    return replace(turns[0], parts=parts)
