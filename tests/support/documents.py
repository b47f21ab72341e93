"""What tests read from the documents: tables, fenced blocks, executable examples."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_EXAMPLE = re.compile(
    r"<!-- expects: (?P<pattern>.+?) -->\n```(?P<language>bash|python)\n(?P<command>.+?)\n```", re.DOTALL
)


def read(name: str) -> str:
    """A document by its path from the root of the repository."""
    return (ROOT / name).read_text()


def readers_environment() -> dict[str, str]:
    """That of the tests without its offline mode, in which huggingface_hub sends no request to any server."""
    return {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}


class Example(NamedTuple):
    language: str
    """`bash` or `python`."""
    command: str
    pattern: str
    """Of what it writes to standard output."""


def examples(name: str) -> list[Example]:
    """The commands and programs of a document that can be run."""
    return [Example(match["language"], match["command"], match["pattern"]) for match in _EXAMPLE.finditer(read(name))]


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one of its depth or higher."""
    start = re.search(rf"^(#+) {re.escape(heading)}$", text, re.M)
    assert start is not None, f"there is no heading {heading!r}"
    rest = text[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, re.M)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows but heads, as they are written."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rules = [index for index, row in enumerate(cells) if all(set(cell) <= {"-"} for cell in row)]
    heads = {index - 1 for index in rules}
    return [row for index, row in enumerate(cells) if index not in heads and index not in rules]


def bare(cell: str) -> str:
    """A cell without its code quotes."""
    return cell.replace("`", "")


def commands(text: str, mark: str) -> list[list[str]]:
    """The words of each fenced command behind `<!-- mark -->`."""
    blocks = re.findall(rf"<!-- {mark} -->\n```\w*\n(.+?)\n```", text, re.DOTALL)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


def block(text: str, mark: str) -> str:
    """The one fenced block behind `<!-- mark -->`."""
    found = re.findall(rf"<!-- {mark} -->\n```\w*\n(.+?)\n```", text, re.DOTALL)
    assert len(found) == 1
    return str(found[0])
