"""Arguments between tags: raw strings, else JSON, by schema."""

from __future__ import annotations

import json

from router.openai.formats.format import CallReader, ObjectWriter
from router.openai.formats.source import Say, Steps

STRING = frozenset({"string"})


def tagged_value(reader: CallReader, writer: ObjectWriter, types: frozenset[str], *ends: str) -> Steps[bool]:
    """Read a value to an end mark, strings as they come; False: cut."""
    marks = tuple(reader.mark(end) for end in ends)
    if types == STRING:
        writer.value('"')
        if not (yield from reader.source.text_until(marks, lambda text: writer.value(_escaped(reader, text)))):
            return False
        writer.value('"')
        return True
    pieces: list[str] = []
    if (yield from _json_value(reader, marks, pieces.append)):
        writer.value(reader.types.json_of(reader.visible("".join(pieces)), types))
        return True
    pieces.clear()
    found = yield from reader.source.text_until(marks, pieces.append)
    writer.value(reader.types.json_of(reader.visible("".join(pieces)), types))
    return bool(found)


def _json_value(reader: CallReader, marks: tuple[str, ...], say: Say) -> Steps[bool]:
    """Read a list, object or string, which may hold the end mark, if whole."""
    source = reader.source
    position = source.hold()
    yield from source.space()
    if (yield from source.peek()) in ('"', "[", "{") and (yield from source.json_value(say)):
        end = yield from source.literal(*marks)
        if not end:
            yield from source.space()
            end = yield from source.literal(*marks)
        if end:
            source.release()
            return True
    source.rewind(position)
    return False


def _escaped(reader: CallReader, text: str) -> str:
    return json.dumps(reader.visible(text), ensure_ascii=False)[1:-1]
