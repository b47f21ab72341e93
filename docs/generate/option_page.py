"""The options of a process as Markdown, from the one place where they are declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from docs.generate.markdown import cell, code, table
from wire.cli.options import Option, options_of
from wire.cli.parsing import UNSIGNED_MAX
from wire.cli.spelling import spell

NONE = "–"
_HEAD = ("Option", "Variable", "Value", "Default", "Meaning")
_KINDS = {int: "whole number", float: "number", str: "text", Path: "path", bool: "`true` or `false`"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}


def option_tables(config_type: type, mark: Callable[[Option], str]) -> str:
    """One table, or one below the heading of each panel. `mark` is put after an option's meaning."""
    parts = []
    for panel, options in groupby(options_of(config_type), key=lambda opt: opt.panel):
        rows = [_row(opt, mark(opt)) for opt in options]
        parts += [f"## {panel}" if panel else "", table(_HEAD, rows)]
    return "\n\n".join(part for part in parts if part)


def _row(opt: Option, mark: str) -> Sequence[str]:
    meaning = " ".join(filter(None, [cell(opt.help).rstrip("."), mark]))
    hidden = " Not on the help page." if opt.hidden else ""
    variable = code(opt.env) if opt.env else NONE
    return names(opt), variable, values(opt), default(opt), f"{meaning}.{hidden}"


def names(opt: Option) -> str:
    if opt.positional:
        return code(opt.metavar)
    spelled = [opt.flag, *([opt.negative_flag] if opt.is_negatable else []), *([opt.short] if opt.short else [])]
    return ", ".join(map(code, spelled))


def values(opt: Option) -> str:
    """What may be given, in words."""
    if opt.is_switch:
        return "switch"
    if opt.choices:
        return ", ".join(map(code, opt.choices))
    kind = (_MANY if opt.is_repeated else _KINDS)[opt.item]
    if opt.unit is not None:
        kind = f"number of {opt.unit}"
    text = " ".join(filter(None, [kind, _bounds(opt)]))
    if opt.is_repeated and not opt.positional:
        text += f"; the option may be repeated{', or one value cut at commas' if opt.separator == ',' else ''}"
    return text


def _bounds(opt: Option) -> str:
    low = 0 if opt.minimum is None and opt.item is int else opt.minimum
    high = None if opt.maximum == UNSIGNED_MAX else opt.maximum
    if low is not None and high is not None:
        return f"from {spell(low)} to {spell(high)}"
    if high is not None:
        return f"up to {spell(high)}"
    return f"from {spell(low)} up" if low else ""


def default(opt: Option) -> str:
    if opt.required:
        return "required"
    if opt.is_switch:
        return "on" if opt.default else "off"
    if opt.default in (None, [], (), ""):
        return NONE
    given = opt.default if opt.is_repeated else [opt.default]
    return code(",".join(map(spell, given)))
