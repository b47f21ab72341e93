"""Tests a template's format: renders calls, and reads them, comparing prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from router.answers.formats.events import Arguments, CallEnded, CallStarted, ChatEvent
from router.answers.formats.format import Format
from router.answers.formats.markers import Markers
from router.answers.formats.reader import AnswerReader
from router.answers.formats.reasoning import ReasoningStyle
from router.answers.formats.schema_types import ArgumentTypes
from router.errors import TemplateError
from router.template.messages import Turn
from router.template.template import ChatTemplate

_CITY = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Looks something up", "parameters": _CITY}}
    for name in ("get_weather", "get_time")
]
_CALLS = [("get_weather", {"city": 'Zürich "x"\nsüd', "n": 3}), ("get_time", {"city": "日本", "n": -1})]
_QUESTION = Turn(role="user", parts="Which weather?")


async def calls_in_an_answer(
    template: ChatTemplate, format: Format, style: ReasoningStyle | None, markers: Markers
) -> int:
    """Return how many of two calls are read as rendered."""
    marks = [*format.marks, *format.starts, *(style.marks if style else ())]
    for count in (1,) if format.is_one else (2, 1):
        expected = _CALLS[:count]
        for content in (None, ""):  # as clients write an answer without text
            reader = AnswerReader(format, style, markers, types=ArgumentTypes({name: _CITY for name, _ in _CALLS}))
            try:
                text = await _answer(template, expected, format, content, marks)
            except TemplateError:
                continue
            if _read(reader.read(markers.encoded(text)) + reader.end())[:count] == expected:
                return count
    return 0


async def _answer(
    template: ChatTemplate, calls: list[tuple[str, Any]], format: Format, content: str | None, marks: Iterable[str]
) -> str:
    """Return an answer between its prompt and the later chat."""
    ids = [format.ids.new(name, number) for number, (name, _) in enumerate(calls)]
    tool_calls = [
        {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
        for identifier, (name, arguments) in zip(ids, calls, strict=True)
    ]
    results = [
        Turn(role="tool", parts="sunny", tool_call_id=identifier, name=name)
        for identifier, (name, _) in zip(ids, calls, strict=True)
    ]
    turns = [_QUESTION, Turn(role="assistant", parts=content, tool_calls=tool_calls), *results]
    prompt = _from_question(await template.render([_QUESTION], _TOOLS))
    later = _from_question(await template.render(turns, _TOOLS))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, later, strict=False)))
    marks = list(marks)
    return later[min(_outside_marks(later, same, marks), _outside_marks(prompt, same, marks)) :]


def _from_question(prompt: str) -> str:
    """Cut off what may differ from prompt to prompt, such as the time or the number of messages."""
    return prompt[max(0, prompt.rfind(_QUESTION.text)) :]


def _outside_marks(text: str, place: int, marks: Iterable[str]) -> int:
    """Move a place before a mark around it, since prompts may end in a similar one."""
    around = [
        start
        for mark in marks
        if (start := text.find(mark, max(0, place - len(mark) + 1), place + len(mark) - 1)) >= 0 and start < place
    ]
    return min(around, default=place)


def _read(events: list[ChatEvent]) -> list[tuple[str, Any]]:
    """Return complete calls with arguments."""
    calls: list[tuple[str, Any]] = []
    name = text = ""
    for event in events:
        if isinstance(event, CallStarted):
            name, text = event.name, ""
        elif isinstance(event, Arguments):
            text += event.text
        elif isinstance(event, CallEnded) and event.is_complete:
            calls.append((name, json.loads(text)))
    return calls
