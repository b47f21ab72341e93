"""The texts that people read: Markdown and HTML without code and tags; strings, docstrings and comments of Python."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

Text = tuple[int, str]
"""The line on which a text begins, counted from 1, and the text."""

_FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.M | re.S)
_CODE = re.compile(r"``[^`]+``|`[^`\n]*`|\]\([^)]*\)|https?://\S+|<[^>\n]*>")
_TABLE_RULE = re.compile(r"^\s*\|?[\s:|-]+\|?\s*$", re.M)


def texts_of(path: Path) -> Iterator[Text]:
    source = path.read_text()
    yield from (_python(source) if path.suffix == ".py" else _markdown(source))


def without_code(text: str) -> str:
    """Code, addresses and tags become as many `#`, so that a finding keeps its place."""
    return _CODE.sub(_blank, text)


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "#", found[0])


def _markdown(source: str) -> Iterator[Text]:
    """One text for each paragraph or row of a table."""
    source = _TABLE_RULE.sub("", _FENCED.sub(_blank, source))
    lines = list(enumerate(source.split("\n"), 1))
    for is_text, block in groupby(lines, key=lambda line: bool(line[1].strip())):
        if is_text:
            numbered = list(block)
            yield numbered[0][0], "\n".join(line for _, line in numbered)


def _python(source: str) -> Iterator[Text]:
    yield from _comments(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(_part(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _part(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{}"


def _comments(source: str) -> Iterator[Text]:
    """Comments on consecutive lines are one text."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    for _, block in groupby(enumerate(tokens), key=lambda item: item[1].start[0] - item[0]):
        lines = [token for _, token in block]
        yield lines[0].start[0], "\n".join(line.string.lstrip("#: ") for line in lines)
