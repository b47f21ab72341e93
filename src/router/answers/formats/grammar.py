"""Grammars of the model's own calls: a frame with token ids, and schemas apart.

Clients' schemas are never part of the frame's text, and names only as literals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.answers.formats.format import SAME_NAME, SEPARATOR, SPACE, CallForm, Format
from router.answers.formats.markers import Markers
from router.answers.formats.pieces.argument_rules import PLACES, ArgumentRules, UnsuitableError, symbols
from router.grammar.listed import listed

_END = "$END"
"""The model's end tokens, which the shard knows (`wire.grammar`)."""
_NAME = re.compile(r"[\w.:/-]+")
"""What a function may be called in all of the formats."""
_MOST_THOUGHTS = 1_000_000  # llguidance's numbers are bounded; no context is longer
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_META = re.compile(r"[\\/.+*?()|\[\]{}^$#&~-]")


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """What may come first."""

    opens: str = ""  # no thinking
    closes: str = ""
    # Belongs to its mark.
    space: bool = False
    # The prompt has begun it; `is_over`: ended it.
    is_open: bool = False
    is_over: bool = False
    budget: int | None = None  # tokens
    closes_answer: str = ""  # ends the answer in words that the prompt has begun

    def ends(self, markers: Markers) -> str:
        """Return the symbols before calls."""
        return f"{symbols(self.closes_answer, markers)} " if self.closes_answer else ""

    def rules(self, markers: Markers) -> tuple[str, str]:
        """Return first symbol and rules; empty without thinking."""
        if not self.opens or self.is_over:
            return "", ""
        space = SPACE if self.space else ""
        first, closes = markers.pieces(self.closes)[0], symbols(self.closes + space, markers)
        if isinstance(first, int):
            marks = ",".join(map(str, markers.ids))
            count = "*" if self.budget is None else f"{{0,{min(self.budget, _MOST_THOUGHTS)}}}"
            thoughts = "" if self.budget == 0 else f"thought{count} "
            rules = f"inside: {thoughts}{closes}\nthought: <[^{marks},{_END}]>\n"
        else:
            rules = f"inside: thoughts {symbols(space, markers)}\nthoughts[lazy]: /(.|\\n)*{_literal(self.closes)}/\n"
        if self.is_open:
            return "inside ", rules
        return "thinking? ", f"thinking: {symbols(self.opens, markers)} inside\n{rules}"


@dataclass(frozen=True)
class _Frame:
    """Rules of calls, and their schemas."""

    rules: str
    schemas: Sequence[Any]


def is_suitable(names: Iterable[str]) -> bool:
    """Whether a grammar can call such names."""
    return all(_NAME.fullmatch(name) for name in names)


def has_rules(format: Format, markers: Markers, schemas: Mapping[str, Any]) -> bool:
    """Whether a grammar can hold calls to these schemas."""
    if format.form is None or not is_suitable(schemas):
        return False
    try:
        _calls(format.form, markers, schemas, is_one=True)
    except UnsuitableError:
        return False
    return True


def forced_calls(
    format: Format, markers: Markers, schemas: Mapping[str, Any], thinking: Thinking, *, is_one: bool
) -> str:
    """Require calls alone behind thinking."""
    assert format.form is not None
    first, rules = thinking.rules(markers)
    calls = _calls(format.form, markers, schemas, is_one)
    start = f"start: {first}{thinking.ends(markers)}calls {_space_behind(format)}\n"
    return _listed(f"{start}{rules}{calls.rules}", calls.schemas)


def free_calls(format: Format, markers: Markers, schemas: Mapping[str, Any], *, is_one: bool) -> str | None:
    """Allow any text, and calls from their opener on, if one opens them."""
    return _behind_token(format, markers, schemas, is_one) or _behind_text(format, markers, schemas, is_one)


def _behind_token(format: Format, markers: Markers, schemas: Mapping[str, Any], is_one: bool) -> str | None:
    form = format.form
    if form is None or format.turn is not None or form.trigger is None:
        return None
    opening = form.trigger if markers.is_token(form.trigger) else form.begin or form.before_name
    mark = next((one for one in markers.pieces(opening)[:2] if isinstance(one, int)), None)
    if mark is None:
        return None
    calls = _calls(form, markers, schemas, is_one, begins_at=mark)
    rest, rules = _rest(form, markers, mark)
    start = f"start: any* (calls {rest}){'?' if is_one else '*'}\n"
    return _listed(start + rules + calls.rules, calls.schemas, {"trigger": mark})


def _behind_text(format: Format, markers: Markers, schemas: Mapping[str, Any], is_one: bool) -> str | None:
    """Open calls by each function's name and what surrounds it."""
    form = format.form
    if form is None or any(place in form.begin + form.before_name for place in PLACES):
        return None
    calls = _calls(form, markers, schemas, is_one, is_begun=True)
    texts = [_opening(form, name) for name in schemas]
    trigger: dict[str, Any] = {"texts": texts}
    if format.turn is None and not texts[0].startswith(format.openers):
        trigger["behind"] = ["", *format.openers]  # calls are at the beginning of an answer only
    between = markers.pieces(form.between)[:1]
    # The token that would begin another call.
    stops_at = f"{between[0]},{_END}" if is_one and between and isinstance(between[0], int) else _END
    rest, rules = _rest(form, markers, stops_at)
    if is_one and not form.begin and form.before_name.startswith(format.openers):
        # No token opens another call: it would be text.
        openers = "|".join(map(_literal, format.openers))
        rest, rules = "REST?", f"REST: (/(.|\\n)+/ & ~/(.|\\n)*({openers})(.|\\n)*/)\n"
    return _listed(f"start: calls {rest}\n{rules}{calls.rules}", calls.schemas, {"trigger": trigger})


def _space_behind(format: Format) -> str:
    """Allow white space where no token ends calls."""
    return "" if format.turn is not None and format.is_one else PLACES[SPACE]


def _rest(form: CallForm, markers: Markers, stops_at: int | str) -> tuple[str, str]:
    """Return what may follow calls, up to an excepted token."""
    last = markers.pieces(form.end or form.behind_arguments or "}")[-1]
    # The last token of a call may hold text behind it, which cannot be the beginning of the next call.
    behind = "" if isinstance(last, int) else "TEXT? "
    text = "/[ \\n\\t]*([^ \\n\\t;{](.|\\n)*)?/" if SEPARATOR in form.between else "/(.|\\n)+/"
    return f"{behind}any*", f"any: <[^{stops_at}]>\n" + (f"TEXT: {text}\n" if behind else "")


def _opening(form: CallForm, name: str) -> str:
    return (form.begin + form.before_name + name + _behind_name(form, name)[0]).rstrip()


def _behind_name(form: CallForm, name: str) -> tuple[str, str]:
    """Split the text at its first place, which may hold several texts."""
    whole = form.behind_name.replace(SAME_NAME, name)
    text = re.split(f"[{''.join(PLACES)}]", whole)[0]
    return text, whole[len(text) :]


def limited_thinking(
    thinking: Thinking, format: Format | None, markers: Markers, schemas: Mapping[str, Any], *, is_one: bool
) -> str:
    """Bound thinking, then allow text and opened calls."""
    first, rules = thinking.rules(markers)
    free = None if format is None or not schemas else _behind_token(format, markers, schemas, is_one)
    if free is not None:
        grammars = json.loads(free)["grammars"]
        frame = grammars[0]["lark_grammar"].replace("start: ", f"start: {first}", 1) + rules
        return listed(frame, *grammars[1:])
    return _listed(f"start: {first}any*\nany: <[^{_END}]>\n{rules}", [])


def answer_behind(thinking: Thinking, markers: Markers, form: Mapping[str, Any], answers: str = "") -> str:
    """Require an answer of a form behind thinking."""
    first, rules = thinking.rules(markers)
    frame = f"start: {first}{symbols(answers, markers)} @answer\n{rules}"
    return listed(frame, {"name": "answer", **form})


def calls_or_answer(
    format: Format,
    markers: Markers,
    schemas: Mapping[str, Any],
    thinking: Thinking,
    schema: Any,
    *,
    is_one: bool,
    answers: str = "",
) -> str:
    """Require calls, or an answer by schema, behind thinking."""
    assert format.form is not None
    first, rules = thinking.rules(markers)
    calls = _calls(format.form, markers, schemas, is_one)
    answer = f"answer: {symbols(answers + SPACE, markers)} @tool_{len(calls.schemas)}\n"
    start = f"start: {first}({thinking.ends(markers)}calls {_space_behind(format)} | answer)\n"
    frame = f"{start}{rules}{answer}{calls.rules}"
    return _listed(frame, [*calls.schemas, schema])


def _calls(
    form: CallForm,
    markers: Markers,
    schemas: Mapping[str, Any],
    is_one: bool,
    *,
    is_begun: bool = False,
    begins_at: int | None = None,
) -> _Frame:
    """Return rules of calls.

    Args:
        is_begun: The first begins with any text that ends with its name.
        begins_at: The token that begins them; text before is not theirs.
    """

    def of(text: str) -> str:
        return symbols(text, markers)

    rules = None if form.arguments is None else ArgumentRules(form.arguments, markers)
    arguments = {
        name: f"@tool_{number}" if rules is None else rules.of(name, schema)
        for number, (name, schema) in enumerate(schemas.items())
    }
    named = [f"{of(name + ''.join(_behind_name(form, name)))} {fitting}" for name, fitting in arguments.items()]
    more = "" if is_one else f" ({of(form.between)} call)*"
    call = f"{of(form.before_name)} ({' | '.join(named)}) {of(form.behind_arguments)}"
    first, heads = f"{_from(begins_at, of(form.begin))} call", ""
    if is_begun:
        begun = [
            f"head_{number} {of(_behind_name(form, name)[1])} {of(SPACE)} {fitting}"
            for number, (name, fitting) in enumerate(arguments.items())
        ]
        first = f"({' | '.join(begun)}) {of(form.behind_arguments)}"
        heads = "".join(_head(number, _opening(form, name), markers) for number, name in enumerate(arguments))
    text = f"calls: {first}{more} {of(form.end)}\ncall: {call}\n{heads}"
    if rules is None:
        return _Frame(text, [_of_object(schema) for schema in schemas.values()])
    return _Frame(text + "".join(f"{rule}\n" for rule in rules.rules), rules.schemas)


def _of_object(schema: Any) -> Any:
    """Return a schema of objects alone."""
    if schema is None:
        return _NO_ARGUMENTS
    return {**schema, "type": "object"} if isinstance(schema, dict) else schema


def _from(token: int | None, text: str) -> str:
    """Return symbols from this token on."""
    _, mark, behind = text.partition(f"<[{token}]>")
    return mark + behind if mark else text


def _head(number: int, opening: str, markers: Markers) -> str:
    """Return a call's beginning, whose first token may hold other text before."""
    first = markers.pieces(opening)[0]
    if isinstance(first, int):
        return f"head_{number}: {symbols(opening, markers)}\n"
    rest = opening[len(first) :]
    if not rest:
        return f"head_{number}[lazy]: /(.|\\n)*{_literal(first)}/\n"
    return (
        f"head_{number}: begin_{number} {symbols(rest, markers)}\nbegin_{number}[lazy]: /(.|\\n)*{_literal(first)}/\n"
    )


def _literal(text: str) -> str:
    """Escape text for a regex between slashes."""
    return _META.sub(lambda found: chr(92) + found[0], text).replace("\n", "\\n")


def _listed(frame: str, schemas: Sequence[Any], trigger: Mapping[str, Any] | None = None) -> str:
    """List the frame; before `trigger` anything may come (`wire.grammar`)."""
    tools = [{"name": f"tool_{number}", "json_schema": schema} for number, schema in enumerate(schemas)]
    return listed(frame, *tools, **(trigger or {}))
