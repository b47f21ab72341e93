"""Tables of the migration guides that come from the words of other servers, which the parser of options knows too.

A table is between `<!-- words: SERVER KIND -->` and `<!-- end of words -->`; KIND is `options`, `variables` or
`commands`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from docs.generate.field_tables import filled, has_place
from docs.generate.markdown import table
from wire.cli.other_servers.words import Words, words_of

DOCS = Path(__file__).parents[1]
_TABLE = re.compile(r"(<!-- words: (\w+) (\w+) -->\n).*?(\n<!-- end of words -->)", re.DOTALL)


def guides() -> Mapping[Path, str]:
    """Path → text with the tables as they are now, of each guide that has some."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    wanted = {path: filled(_TABLE.sub(_filled, text)) for path, text in texts.items()}
    return {path: text for path, text in wanted.items() if _TABLE.search(text) or has_place(text)}


def _filled(found: re.Match[str]) -> str:
    begin, server, kind, end = found.groups()
    words = words_of(server)
    tables = {"options": _options, "variables": _variables, "commands": _commands}
    return f"{begin}{tables[kind](words)}{end}"


def _options(words: Words) -> str:
    head = [words.title, "Default there", "Here", "State", "What to know"]
    rows = [[_spelled(words, row.word), row.default, _code(row.ours), row.state, row.note] for row in words.options]
    return table(head, rows)


def _variables(words: Words) -> str:
    head = [f"Variable of {words.title}", "Here", "State", "What to know"]
    return table(head, [[_code(row.word), _code(row.ours), row.state, row.note] for row in words.variables])


def _commands(words: Words) -> str:
    return table([f"`{words.title}`", "Here"], [[_code(theirs), ours] for theirs, ours in words.commands])


def _spelled(words: Words, word: str) -> str:
    return ", ".join(map(_code, [word, *words.spellings(word)]))


def _code(text: str) -> str:
    return text if text == "–" else f"`{text}`"
