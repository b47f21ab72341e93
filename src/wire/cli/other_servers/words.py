"""What another server's option, value or command is called here."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SERVERS = ("vllm", "llama_cpp", "sglang", "ollama", "tei", "general")
_NONE = "–"


class Row(NamedTuple):
    """An option of another server. `ours` and `note` are `–` where there is nothing to say."""

    word: str
    default: str
    ours: str
    state: str
    note: str


class VariableRow(NamedTuple):
    """A variable of another server."""

    word: str
    ours: str
    state: str
    note: str


@dataclass(frozen=True)
class Words:
    """What one server's users type."""

    title: str
    options: tuple[Row, ...] = ()
    variables: tuple[VariableRow, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()  # another spelling, the option's word
    commands: tuple[tuple[str, str], ...] = ()  # the command, ours
    values: tuple[tuple[str, str, str], ...] = ()  # our option, their value, ours; empty: leave the option out

    def spellings(self, word: str) -> list[str]:
        """The other spellings of an option."""
        return [alias for alias, meant in self.aliases if meant == word]


@functools.cache
def words_of(server: str) -> Words:
    """Read the table of one of `SERVERS`."""
    read: dict[str, Any] = tomllib.loads((Path(__file__).parent / f"{server}.toml").read_text(encoding="utf-8"))
    return Words(
        title=read["title"],
        options=tuple(Row(*row) for row in read.get("options", ())),
        variables=tuple(VariableRow(*row) for row in read.get("variables", ())),
        aliases=tuple((alias, meant) for alias, meant in read.get("aliases", ())),
        commands=tuple((command, ours) for command, ours in read.get("commands", ())),
        values=tuple((flag, theirs, ours) for flag, theirs, ours in read.get("values", ())),
    )


def option_hint(flag: str, known: Collection[str] | None) -> str:
    """Say behind a `;` what to write instead of another server's option, if known.

    Args:
        known: Options of the called program; None: any.
    """
    said = []
    for server in SERVERS:
        words = words_of(server)
        meant = dict(words.aliases).get(flag, flag)
        row = next((row for row in words.options if row.word == meant), None)
        is_answer = row is not None and (known is None or row.ours in known or not row.ours.startswith("--"))
        if row is not None and is_answer and row.ours != flag:
            said.append((words.title, row))
    if not said:
        return ""
    if len({row.ours for _, row in said}) == 1:
        owners = " and ".join(f"{title}'s" for title, _ in said)
        return f"; it is {owners}{_instead(said[0][1])}"
    return "; " + ", ".join(f"it is {title}'s{_instead(row)}" for title, row in said)


def _instead(row: Row) -> str:
    if row.ours != _NONE:
        return f": use {row.ours}" if row.ours.startswith("--") else f": set the variable {row.ours}"
    note = _plain(row.note)
    need = "needs no option here" if row.state == "always on" else "has no option here"
    return f" and {need}" + (f" ({note})" if note else "")


def _plain(note: str) -> str:
    """The first sentence of a note, without Markdown."""
    text = note.partition(". ")[0].rstrip(".").replace("`", "")
    return "" if text == _NONE else text.partition("](")[0].replace("[", "")


def value_hint(flag: str, value: str) -> str:
    """Return which value of our option another server's value is, behind a `;`; empty for an unknown one."""
    for server in SERVERS:
        for ours, theirs, meant in words_of(server).values:
            if (ours, theirs) == (flag, value.lower()):
                return f"; {value} is {meant} here" if meant else f"; leave {flag} out for {value}"
    return ""


def command_hint(word: str) -> str | None:
    """Return the command of ours that stands for another server's; None for an unknown one."""
    for server in SERVERS:
        for theirs, ours in words_of(server).commands:
            if theirs == word:
                return ours
    return None
