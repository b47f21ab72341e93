"""Tables and words of Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

_WIDTH = 120
WRITTEN_BY = "<!-- Written by `make reference`; do not edit. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One line for each row, without padding: a change in one row is a change of one line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def code(text: str) -> str:
    """In a table: the bar would end the cell."""
    return "`" + text.replace("|", "\\|") + "`"


def cell(text: str) -> str:
    """Prose within a table: `<` would begin a tag, but not within a code span."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def page(*parts: str) -> str:
    """A heading and what follows it; prose is filled to the width of the house."""
    return "\n\n".join([parts[0], WRITTEN_BY, *(_filled(part) for part in parts[1:] if part)]) + "\n"


def _filled(part: str) -> str:
    if part.startswith(("#", "|", "    ")):
        return part
    paragraphs = part.split("\n\n")
    return "\n\n".join(textwrap.fill(one, _WIDTH, break_long_words=False, break_on_hyphens=False) for one in paragraphs)
