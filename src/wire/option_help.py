"""The `--help` page of a config: a panel for each group of options, as wide as the terminal. Parses nothing.

Plain text, drawn here: the libraries that draw such pages take longer to import than all the rest of `--help`.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wire.options import Option, options_of, spell

_KINDS = {int: "int", float: "float", Path: "path", bool: "true|false"}
_NARROWEST, _WIDEST, _PIPED = 60, 140, 120
_HELP_COLUMN = 30
"""The description gets at least so much of a line, whatever the names and values need."""
_FIXED_SPACE = "\u00a0"
_BOLD, _DIM, _PLAIN = "\033[1m", "\033[2m", "\033[0m"


@dataclass(frozen=True)
class _Row:
    """One option as three columns."""

    names: str
    value: str
    text: str


def print_help(config_type: type, prog: str, description: str) -> None:
    """Writes the page to standard output. A reader that has seen enough (`| head`) is no error."""
    try:
        print(page(config_type, prog, description, width=_width(), styled=_is_styled()), flush=True)  # noqa: T201
    except BrokenPipeError:
        # Else the interpreter's own flush at its end would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def page(config_type: type, prog: str, description: str, *, width: int = _PIPED, styled: bool = False) -> str:
    """The page as text."""
    options = options_of(config_type)
    arguments = [opt for opt in options if opt.positional]
    lines = ["", f" Usage: {prog} [OPTIONS]" + "".join(f" {opt.metavar}" for opt in arguments), ""]
    flags = [opt for opt in options if not opt.positional]
    usual = 4 * sum(opt.env == opt.name.upper() for opt in flags) > 3 * len(flags)
    if usual:
        description += (
            "\n\nAn option is also read from the environment variable of its name (--max-batch-size from "
            "MAX_BATCH_SIZE); the command line wins."
        )
    for paragraph in description.split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width - 2, initial_indent=" ", subsequent_indent=" "), ""]
    panels: dict[str, list[_Row]] = {}
    if arguments:
        panels["Arguments"] = [_Row(opt.metavar, "", _description(opt, usual)) for opt in arguments]
    panels["Options"] = [_Row("--help, -h", "", "Show this page and exit.")]
    for opt in options:
        if not opt.positional and not opt.hidden:
            panels.setdefault(opt.panel or "Options", []).append(
                _Row(_names(opt), _value(opt), _description(opt, usual))
            )
    for title, rows in panels.items():
        lines += _panel(title, rows, width, styled)
    return "\n".join(lines)


def _names(opt: Option) -> str:
    return ", ".join(filter(None, [opt.flag, opt.short]))


def _value(opt: Option) -> str:
    return "" if opt.is_switch else "<" + ("|".join(opt.choices) or _KINDS.get(opt.item, "text")) + ">"


def _description(opt: Option, usual: bool) -> str:
    """usual: that an option has the variable of its name goes without saying; else that it has one is said."""
    notes = []
    if opt.is_negatable:
        notes.append(f"default: on; off: {opt.negative_flag}" if opt.default else f"or {opt.negative_flag}")
    if not opt.is_switch and opt.default not in (None, [], ()):
        notes.append("default: " + (",".join(map(spell, opt.default)) if opt.is_repeated else spell(opt.default)))
    if opt.env is not None and (not usual or opt.env != opt.name.upper()):
        notes.append(f"variable: {opt.env}")
    if usual and opt.env is None and not opt.positional:
        notes.append("no variable")
    if opt.required:
        notes.append("required")
    # A note stays on one line.
    return " ".join([opt.help, *(f"[{note}]".replace(" ", _FIXED_SPACE) for note in notes)])


def _panel(title: str, rows: Sequence[_Row], width: int, styled: bool) -> Iterable[str]:
    inner = width - 4
    names = max(len(row.names) for row in rows) + 2
    # A list of many choices would take the room of the descriptions: it goes to the head of its own description.
    limit = inner - names - _HELP_COLUMN
    values = max((len(row.value) + 2 for row in rows if len(row.value) + 2 <= limit), default=0)
    yield f"╭─ {title} " + "─" * (width - len(title) - 5) + "╮"
    for row in rows:
        value, text = (
            (row.value, row.text) if len(row.value) <= values else ("", f"{row.value.replace('|', '| ')} {row.text}")
        )
        room = max(_HELP_COLUMN, inner - names - values)
        for index, line in enumerate(textwrap.wrap(text, room, break_on_hyphens=False) or [""]):
            head = f"{row.names:<{names}}" if not index else " " * names
            kind = f"{value:<{values}}" if not index else " " * values
            shown = f"{_BOLD}{head}{_PLAIN}{_DIM}{kind}{_PLAIN}" if styled else head + kind
            yield f"│ {shown}{line}{' ' * (inner - names - values - len(line))} │".replace(_FIXED_SPACE, " ")
    yield "╰" + "─" * (width - 2) + "╯"


def _width() -> int:
    """In a pipe the usual 80 columns would cut long names; TERMINAL_WIDTH and COLUMNS say otherwise."""
    asked = os.environ.get("TERMINAL_WIDTH", "")
    if asked.isdecimal():
        columns = int(asked)
    else:
        columns = shutil.get_terminal_size((_PIPED, 24)).columns if sys.stdout.isatty() else _PIPED
    return min(max(columns, _NARROWEST), _WIDEST)


def _is_styled() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
