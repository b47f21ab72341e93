"""Arguments between tags: raw strings, else JSON, by schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from router.answers.formats.format import ArgumentsForm, CallForm, CallReader, Format, ObjectWriter, Values
from router.answers.formats.pieces.names import name_before
from router.answers.formats.source import Say, Steps

STRING = frozenset({"string"})
_CDATA, _CDATA_END = "<![CDATA[", "]]>"


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Hold the marks of calls in their order; white space may be between."""

    call: tuple[str, ...]  # in front of a name
    behind_name: tuple[str, ...]  # one of them
    key: str
    behind_key: str
    value: str = ""  # in front of a value, if it has a mark of its own
    behind_value: str
    call_end: str  # behind the last argument
    call_close: str = ""  # behind that, if it is another mark
    ends: tuple[str, ...] = ()  # behind the last call
    has_lines: bool = False  # a line end at each end of a value is no part of it
    has_cdata: bool = False  # values may be between the marks of XML for text as it is
    may_double: bool = False  # a name may come twice, with a dot between

    @property
    def behind_calls(self) -> tuple[str, ...]:
        """Name the marks that may follow the end of a call."""
        return tuple(filter(None, (self.call_close, *self.ends, self.call[0])))


def tagged_format(
    tags: Tags,
    *,
    line: str = "",
    before_name: str = "",
    behind_name: str,
    behind_arguments: str = "",
    begin: str = "",
    between: str = "",
    end: str = "",
    **names: Any,
) -> Format:
    """Make a format of these marks, with `line` behind keys and values."""
    lines = "\n" if tags.has_lines else ""

    def read(reader: CallReader, opener: str) -> Steps[None]:
        return tagged_calls(reader, tags, opener)

    return Format(
        read=read,
        form=CallForm(
            before_name=before_name or "".join(tags.call),
            behind_name=behind_name,
            behind_arguments=behind_arguments or tags.call_end + tags.call_close,
            begin=begin,
            between=between,
            end=end,
            arguments=ArgumentsForm(
                values=Values.TAGGED,
                before_key=tags.key,
                behind_key=tags.behind_key + (line + tags.value if tags.value else "") + lines,
                behind_value=lines + tags.behind_value + line,
                ends_text=(tags.behind_value,),
            ),
        ),
        **names,
    )


def tagged_calls(reader: CallReader, tags: Tags, opener: str) -> Steps[None]:
    """Read calls in a row, and the marks that end them."""
    before = reader.num_started
    opening = tags.call[tags.call.index(opener) + 1 :] if opener in tags.call else tags.call
    while (yield from reader.attempt(_call(reader, tags, opening))):
        opening = tags.call
    if tags.ends and reader.num_started > before:
        yield from reader.space_and(*tags.ends)


def _call(reader: CallReader, tags: Tags, opening: tuple[str, ...]) -> Steps[bool]:
    for mark in opening:
        if not (yield from reader.space_and(mark)):
            return False
    name, mark = yield from name_before(reader, *tags.behind_name, tags.key, tags.call_end)
    if not name:
        return False
    if tags.may_double and name not in reader.types and name == f"{(once := name.partition('.')[0])}.{once}":
        name = once
    reader.start(name)
    writer, given = ObjectWriter(reader), set[str]()
    if mark not in (tags.key, tags.call_end):
        mark = yield from reader.space_and(tags.key, tags.call_end)
    while mark == tags.key:
        key = yield from reader.source.until(reader.mark(tags.behind_key))
        if key is None or (tags.value and not (yield from reader.space_and(tags.value))):
            return False
        writer.key(key[0].strip())
        given.add(key[0].strip())
        types = reader.types.of(name, reader.visible(key[0].strip()))
        if not (yield from tagged_value(reader, writer, tags, others(reader, name, given), types)):
            return False
        mark = yield from reader.space_and(tags.key, tags.call_end)
    if mark:
        writer.end()
        if tags.call_close:
            yield from reader.space_and(tags.call_close)
    return bool(mark)


def others(reader: CallReader, function: str, given: Container[str]) -> Callable[[str], bool]:
    """Tell arguments that may still come."""
    return lambda key: key not in given and reader.types.has(function, reader.visible(key))


def narrowed(types: frozenset[str], *, is_text: bool) -> frozenset[str]:
    """Leave what the model says that a value is, unless the schema knows better."""
    if "string" not in types:
        return types
    return STRING if is_text else types - STRING or types


def tagged_value(
    reader: CallReader, writer: ObjectWriter, tags: Tags, may_follow: Callable[[str], bool], types: frozenset[str]
) -> Steps[bool]:
    """Read a value and the mark behind it, strings as they come; False: cut."""
    if tags.has_lines:
        yield from reader.source.literal("\n")
    if types == STRING:
        writer.value('"')
        if not (yield from _until_end(reader, tags, may_follow, lambda text: writer.value(escaped(reader, text)))):
            return False
        writer.value('"')
        return True
    pieces: list[str] = []
    if (yield from whole_json(reader, tags.behind_value, pieces.append)):
        writer.value(reader.types.json_of(reader.visible("".join(pieces)), types))
        return True
    pieces.clear()
    found = yield from _until_end(reader, tags, may_follow, pieces.append)
    writer.value(reader.types.json_of(reader.visible("".join(pieces)), types))
    return found


def _until_end(reader: CallReader, tags: Tags, may_follow: Callable[[str], bool], say: Say) -> Steps[bool]:
    """Pass on a text up to a mark behind which the format continues."""
    source, end = reader.source, reader.mark(tags.behind_value)
    if tags.has_cdata and (yield from source.literal(_CDATA)):
        return bool((yield from source.text_until((_CDATA_END + end,), say)))
    marks = [reader.mark(tags.key), reader.mark(tags.call_end)]
    marks = [f"\n{mark}" for mark in marks] + marks + ([f"\n{end}", end] if tags.has_lines else [end])
    while found := (yield from source.text_until(tuple(marks), say)):
        position = source.hold()
        is_end = yield from _is_end(reader, tags, may_follow, found.removeprefix("\n"))
        source.rewind(position)
        if is_end:
            source.skip(0 if found.endswith(end) else -len(found))
            return True
        say(found)
    return False


def _is_end(reader: CallReader, tags: Tags, may_follow: Callable[[str], bool], mark: str) -> Steps[bool]:
    """Decide whether the mark that was read ends a value."""
    source = reader.source
    if mark == reader.mark(tags.key):
        key = yield from source.until(reader.mark(tags.behind_key))
        return key is not None and may_follow(key[0])
    is_closed = mark == reader.mark(tags.behind_value)
    following = (tags.key, tags.call_end, *tags.behind_calls) if is_closed else tags.behind_calls
    marks = tuple(map(reader.mark, following))
    yield from source.space()
    if (yield from source.literal(*marks)):
        return True
    return is_closed and source.is_complete and any(one.startswith(source.rest) for one in marks)


def whole_json(reader: CallReader, end: str, say: Say) -> Steps[bool]:
    """Read a list, object or string, which may hold the end mark, and that mark; False: nothing, unread."""
    source = reader.source
    position = source.hold()
    yield from source.space()
    if (yield from source.peek()) in ('"', "[", "{") and (yield from source.json_value(say)):
        yield from source.space()
        if (yield from source.literal(reader.mark(end))):
            source.release()
            return True
    source.rewind(position)
    return False


def escaped(reader: CallReader, text: str) -> str:
    return json.dumps(reader.visible(text), ensure_ascii=False)[1:-1]
