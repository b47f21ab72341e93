"""`]<]minimax[>[<invoke name="N">` and an element for each argument, with elements for what is in it: MiniMax M3."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from router.answers.formats.format import NAME, ArgumentsForm, CallForm, CallReader, Format, Values
from router.answers.formats.pieces.names import name_before
from router.answers.formats.pieces.tagged import STRING, escaped, others, whole_json
from router.answers.formats.schema_types import member_of, types_in
from router.answers.formats.source import Say, Steps

_MARK = "]<]minimax[>["
_OPEN, _CLOSE = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"
_INVOKE, _END = f'{_MARK}<invoke name="', f"{_MARK}</invoke>"
_ITEM = "item"
_EMPTY = {"object": "{}", "array": "[]", "null": "null"}
_MAX_DEPTH = 64


def _read(reader: CallReader, opener: str) -> Steps[None]:
    is_complete = yield from reader.attempt(_call(reader, opener))
    while is_complete:
        is_complete = yield from reader.attempt(_call(reader, ""))
    yield from reader.space_and(_CLOSE)


def _call(reader: CallReader, opener: str) -> Steps[bool]:
    if opener != _INVOKE and not (yield from reader.space_and(_INVOKE)):
        return False
    name, _ = yield from name_before(reader, '">')
    if not name:
        return False
    reader.start(name)
    return (yield from _Elements(reader, name).whole())


class _Elements:
    """Passes on the elements of a call as JSON."""

    def __init__(self, reader: CallReader, function: str) -> None:
        self._reader = reader
        self._source = reader.source
        self._mark = reader.mark(_MARK)
        self._root = reader.types.schema_of(function)
        self._given: set[str] = set()
        self._open = ["tool_call"]
        self._may_follow: Callable[[str], bool] = others(reader, function, self._given)

    def whole(self) -> Steps[bool]:
        first = yield from self._tag()
        if first == "</invoke":
            self._reader.argue("{}")
            return True
        return (yield from self._members("invoke", first, self._root, "{}", 0))

    def _tag(self) -> Steps[str]:
        """Read the next tag without its `>`; "": something else is next."""
        position = self._source.hold()
        yield from self._source.space()
        found = None
        if (yield from self._source.literal(self._mark)):
            yield from self._source.space()
            if (yield from self._source.peek()) == "<":
                found = yield from self._source.until(">")
        if found is None:
            self._source.rewind(position)
            return ""
        self._source.release()
        return found[0].strip()

    def _members(self, name: str, tag: str, schema: Any, brackets: str, depth: int) -> Steps[bool]:
        """Read an object's or a list's elements from the first one's tag on, and its own closing tag."""
        is_list, between = brackets == "[]", ""
        self._open.append(name)
        self._reader.argue(brackets[0])
        while tag != f"</{name}":
            if tag[:1] != "<" or tag[1:2] in ("", "/") or depth == _MAX_DEPTH:
                return False
            key = self._reader.visible(tag[1:])
            self._reader.argue(between + ("" if is_list else json.dumps(key, ensure_ascii=False) + ": "))
            if depth == 0:
                self._given.add(key)
            inner = member_of(schema, None if is_list else key, self._root)
            if not (yield from self._value(tag[1:], inner, depth + 1)):
                return False
            between = ", "
            tag = yield from self._tag()
        self._reader.argue(brackets[1])
        self._open.pop()
        return True

    def _value(self, name: str, schema: Any, depth: int) -> Steps[bool]:
        types = types_in(schema, self._root)
        if types == STRING:
            self._reader.argue('"')
            is_whole = yield from self._text(name, depth, lambda text: self._reader.argue(escaped(self._reader, text)))
            self._reader.argue('"' if is_whole else "")
            return is_whole
        pieces: list[str] = []
        position = self._source.hold()
        tag = yield from self._tag()
        if tag and tag[1:2] != "/":
            is_list = tag == f"<{_ITEM}" and "array" in types
            return (yield from self._members(name, tag, schema, "[]" if is_list else "{}", depth))
        if tag:
            self._source.hold()
        self._source.rewind(position)
        is_whole = yield from whole_json(self._reader, f"{_MARK}</{name}>", pieces.append)
        if not is_whole:
            pieces.clear()
            is_whole = yield from self._text(name, depth, pieces.append)
        text = self._reader.visible("".join(pieces))
        empty = next((_EMPTY[kind] for kind in _EMPTY if kind in types), None)
        if text.strip() or "string" in types or empty is None:
            empty = self._reader.types.json_of(text, types)
        self._reader.argue(empty)
        return is_whole

    def _text(self, name: str, depth: int, say: Say) -> Steps[bool]:
        """Pass on a text up to its closing tag, or up to what cannot be in it."""
        while (yield from self._source.text_until((self._mark,), say)):
            position = self._source.hold()
            yield from self._source.space()
            if (yield from self._source.literal(f"</{name}>")):
                self._source.release()
                return True
            found = yield from self._source.until(">")
            self._source.rewind(position)
            if found is not None and self._goes_on(found[0], depth):
                self._source.skip(-len(self._mark))
                return True
            say(self._mark)
        return False

    def _goes_on(self, tag: str, depth: int) -> bool:
        """Whether a tag ends what is around a text, or begins another argument."""
        if tag[:2] == "</":
            return tag[2:] in self._open
        return depth == 1 and tag[:1] == "<" and self._may_follow(tag[1:])


FORMAT = Format(
    name="minimax_m3",
    openers=(_OPEN, _INVOKE),
    closers=(_CLOSE,),
    others=(_MARK, "<tool_call>", "</tool_call>"),
    signs=lambda template: _MARK in template,
    form=CallForm(
        before_name=_INVOKE,
        behind_name='">',
        behind_arguments=_END + "\n",
        begin=_OPEN + "\n",
        end=_CLOSE,
        arguments=ArgumentsForm(
            values=Values.NESTED,
            before_key=_MARK + "<",
            behind_key=">",
            behind_value=f"{_MARK}</{NAME}>",
            ends_text=(_MARK,),
        ),
    ),
    read=_read,
)
