"""Calls as Python writes them: `name(key=literal, ...)`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, ClassVar

from router.answers.formats.format import CallReader, ObjectWriter
from router.answers.formats.source import Source, Steps

_IDENTIFIER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def python_call(reader: CallReader, *, only_offered: bool = False) -> Steps[bool]:
    """Read a call, passing complete values."""
    source = reader.source
    yield from source.space()
    found = yield from source.until("(")
    if found is None or not _IDENTIFIER.fullmatch(name := found[0].strip()):
        return False
    name = name.removesuffix(".call")
    if only_offered and name not in reader.types:
        return False
    reader.start(name)
    writer = ObjectWriter(reader)
    if (yield from reader.space_and(")")):
        writer.end()
        return True
    while True:
        yield from source.space()
        key = yield from source.until("=")
        if key is None or not key[0].strip().isidentifier():
            return False
        writer.key(key[0].strip())
        value = yield from _literal(source)
        writer.value(_json_of(reader.visible(value)))
        if (mark := (yield from source.literal(",", ")"))) == ")":
            writer.end()
            return True
        if not mark:
            return False
        if (yield from reader.space_and(")")):  # a comma behind the last argument
            writer.end()
            return True


def _literal(source: Source) -> Steps[str]:
    """Read up to a value's comma or bracket."""
    pieces: list[str] = []
    open_ones: list[str] = []
    while character := (yield from source.peek()):
        if character in "'\"":
            pieces.append((yield from _quoted(source, character)))
            continue
        if not open_ones and character in ",)":
            break
        if character in _CLOSING:
            open_ones.append(_CLOSING[character])
        elif open_ones and character == open_ones[-1]:
            open_ones.pop()
        source.skip(1)
        pieces.append(character)
    return "".join(pieces)


def _quoted(source: Source, quote: str) -> Steps[str]:
    source.skip(1)
    text, escaped = quote, False
    while character := (yield from source.peek()):
        source.skip(1)
        text += character
        if character == quote and not escaped:
            break
        escaped = character == "\\" and not escaped
    return text


def _json_of(text: str) -> str:
    """Return a literal's JSON; of others a string's."""
    text = text.strip()
    # JSON first: it knows escapes that mean something else in Python.
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text
    if text[:1] in ("'", '"'):  # Python's own texts on a line lack these
        text = text.replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\x00")
    text = re.sub(r"^(-?)0+(?=\d+$)", r"\1", text)
    try:
        tree = _Words().visit(ast.parse(text, mode="eval"))
        return json.dumps(ast.literal_eval(tree), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


class _Words(ast.NodeTransformer):
    """JSON's words within Python's literals."""

    _VALUES: ClassVar[dict[str, bool | None]] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
