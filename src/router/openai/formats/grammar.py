"""Grammars that hold an answer to a model's own format of calls: llguidance's list of a frame and the schemas.

Only the frame names tokens, by their ids; clients' schemas are never part of its text, and names of functions only as
literals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from router.openai.formats.format import INDEX, SPACE, CallForm, Format
from router.openai.formats.markers import Markers

_END = "$END"
"""The model's end tokens, which the shard knows (`wire.grammar`)."""
_NAME = re.compile(r"[\w.:/-]+")
"""What a function may be called in all of the formats."""
_PLACES = {INDEX: "/[0-9]{1,6}/", SPACE: "/[ \\n\\t]{0,20}/"}
_MOST_THOUGHTS = 1_000_000  # llguidance's numbers are bounded; no context is longer
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """What may come before the rest of an answer. `is_open`: the prompt has begun it; `is_over`: it has ended it."""

    opens: str = ""  # no thinking
    closes: str = ""
    is_open: bool = False
    is_over: bool = False
    budget: int | None = None  # tokens

    def rules(self, markers: Markers) -> tuple[str, str]:
        """The symbol at the beginning of the frame, and its rules; both empty where nothing comes first."""
        if not self.opens or self.is_over:
            return "", ""
        first, closes = markers.pieces(self.closes)[0], _symbols(self.closes, markers)
        if isinstance(first, int):
            marks = ",".join(map(str, markers.ids))
            count = "*" if self.budget is None else f"{{0,{min(self.budget, _MOST_THOUGHTS)}}}"
            thoughts = "" if self.budget == 0 else f"thought{count} "
            rules = f"inside: {thoughts}{closes}\nthought: <[^{marks},{_END}]>\n"
        else:
            rules = f"inside: INSIDE\nINSIDE[lazy]: /(.|\\n)*/ {closes}\n"
        if self.is_open:
            return "inside ", rules
        return "thinking? ", f"thinking: {_symbols(self.opens, markers)} inside\n{rules}"


def is_suitable(names: Iterable[str]) -> bool:
    """Whether functions of these names can be called under a grammar."""
    return all(_NAME.fullmatch(name) for name in names)


def forced_calls(
    format: Format, markers: Markers, schemas: Mapping[str, Any], thinking: Thinking, *, is_one: bool
) -> str:
    """One call at least, and nothing else behind the thinking. `schemas`: of parameters, by the functions' names."""
    assert format.form is not None
    first, rules = thinking.rules(markers)
    return _listed(f"start: {first}calls\n{rules}{_calls(format.form, markers, schemas, is_one)}", schemas)


def free_calls(format: Format, markers: Markers, schemas: Mapping[str, Any], *, is_one: bool) -> str | None:
    """Any text, and calls from the token on that opens one; None where no token does. After calls only the end."""
    opener = None if format.form is None else (format.form.begin + format.form.before_name)
    mark = markers.pieces(opener)[0] if opener else ""
    if format.form is None or not isinstance(mark, int) or format.turn is not None:
        return None
    rules = f"any: <[^{mark}]>\n"
    return _listed(f"start: any* calls?\n{rules}{_calls(format.form, markers, schemas, is_one)}", schemas, trigger=mark)


def limited_thinking(
    thinking: Thinking, format: Format | None, markers: Markers, schemas: Mapping[str, Any], *, is_one: bool
) -> str:
    """Thinking within its budget, then any text, and calls where a token opens them."""
    first, rules = thinking.rules(markers)
    free = None if format is None or not schemas else free_calls(format, markers, schemas, is_one=is_one)
    if free is not None:
        grammars = json.loads(free)["grammars"]
        frame = grammars[0]["lark_grammar"].replace("start: ", f"start: {first}", 1) + rules
        return json.dumps({"grammars": [{"name": "frame", "lark_grammar": frame}, *grammars[1:]]}, ensure_ascii=False)
    return _listed(f"start: {first}any*\nany: <[^{_END}]>\n{rules}", {})


def answer_behind(thinking: Thinking, markers: Markers, schema: Any) -> str:
    """An answer that fits a schema, behind the thinking."""
    first, rules = thinking.rules(markers)
    return _listed(f"start: {first}{_PLACES[SPACE]} @tool_0\n{rules}", {"": schema})


def _calls(form: CallForm, markers: Markers, schemas: Mapping[str, Any], is_one: bool) -> str:
    def symbols(text: str) -> str:
        return _symbols(text, markers)

    more = "" if is_one else f" ({symbols(form.between)} call)*"
    named = " | ".join(f"{symbols(name + form.behind_name)} @tool_{number}" for number, name in enumerate(schemas))
    call = f"{symbols(form.before_name)} ({named}) {symbols(form.behind_arguments)}"
    return f"calls: {symbols(form.begin)} call{more} {symbols(form.end)}\ncall: {call}\n"


def _symbols(text: str, markers: Markers) -> str:
    """A text of a format as symbols: tokens by their ids, numbers, and literals."""
    symbols = []
    for piece in markers.pieces(text):
        if isinstance(piece, int):
            symbols.append(f"<[{piece}]>")
            continue
        for literal in re.split(f"([{INDEX}{SPACE}])", piece):
            if literal:
                symbols.append(_PLACES.get(literal) or json.dumps(literal, ensure_ascii=False))
    return " ".join(symbols)


def _listed(frame: str, schemas: Mapping[str, Any], trigger: int | None = None) -> str:
    """`trigger`: the token before which anything may come; the text begins with it (`wire.grammar`)."""
    grammars: list[dict[str, Any]] = [{"name": "frame", "lark_grammar": frame}]
    for number, schema in enumerate(schemas.values()):
        grammars.append({"name": f"tool_{number}", "json_schema": _NO_ARGUMENTS if schema is None else schema})
    first = {} if trigger is None else {"trigger": trigger}
    return json.dumps({**first, "grammars": grammars}, ensure_ascii=False)
