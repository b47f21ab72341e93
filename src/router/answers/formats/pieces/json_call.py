"""Calls as JSON objects of name and arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.answers.formats.format import CallReader
from router.answers.formats.source import Say, Steps

_ARGUMENTS = ("arguments", "parameters")


def json_call(reader: CallReader, *, name_key: str = "name", only_offered: bool = False) -> Steps[bool]:
    """Read an object, passing arguments as written; `only_offered`: other names are text."""
    source, name = reader.source, ""
    own_id: str | None = None
    early: list[str] = []  # arguments that come before the name
    if not (yield from source.literal("{")):
        return False
    has_arguments = False
    while True:
        yield from source.space()
        key = yield from source.json_string()
        if key is None or not (yield from reader.space_and(":")):
            return False
        yield from source.space()
        if key == name_key and not name:
            name = (yield from source.json_string()) or ""
            if not name or (only_offered and name not in reader.types):
                return False
            reader.start(name, own_id)
            reader.argue("".join(early))
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            if not (yield from _arguments(reader, reader.argue if name else early.append)):
                return False
        elif key == "id" and not name:
            own_id = yield from source.json_string()
            if own_id is None:
                return False
        elif not (yield from source.json_value(_drop)):
            return False
        mark = yield from reader.space_and(",", "}")
        if mark != ",":
            break
    if name and not has_arguments and mark:
        reader.argue("{}")
    return mark == "}"


def _arguments(reader: CallReader, say: Say) -> Steps[bool]:
    """Read an object, or its JSON as a string."""
    if (yield from reader.source.peek()) != '"':
        return (yield from reader.source.json_value(say))
    text = yield from reader.source.json_string()
    if text is None:
        return False
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    say(text if is_object else json.dumps(text, ensure_ascii=False))
    return True


def json_calls(
    reader: CallReader,
    end: str = "",
    *,
    name_key: str = "name",
    separators: Sequence[str] = (",",),
    only_offered: bool = False,
) -> Steps[None]:
    """Read a list to its `]` and `end`."""
    while (yield from reader.attempt(_next(reader, name_key, only_offered))):
        mark = yield from reader.space_and(*separators, "]")
        if mark not in separators:
            break
    if end:
        yield from reader.space_and(end)


def _next(reader: CallReader, name_key: str, only_offered: bool) -> Steps[bool]:
    yield from reader.source.space()
    return (yield from json_call(reader, name_key=name_key, only_offered=only_offered))


def _drop(text: str) -> None:
    """What is not passed on."""
