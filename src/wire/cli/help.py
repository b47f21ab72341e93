"""The `--help` page of a config, drawn by typer: panels, defaults, colours on a terminal. Parses nothing."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

from wire.cli import sizes
from wire.cli.options import Option, options_of
from wire.cli.spelling import spell

_KINDS = {int: "int", float: "float", Path: "path", bool: "true|false"}


def print_help(config_type: type, prog: str, description: str) -> None:
    """Writes the page to standard output."""
    # Read by typer when it is imported. In a pipe the default would be 80 columns, which cut long option names.
    if not sys.stdout.isatty():
        os.environ.setdefault("TERMINAL_WIDTH", "120")
    import typer

    options = options_of(config_type)
    parameters = []
    for opt in options:
        # Each value is text to typer, whatever its type: ranges and choices are said by our own metavar and parser.
        annotation: Any = bool if opt.is_switch else str
        has_usual_name = opt.env == opt.name.upper()
        shown: dict[str, Any] = {"hidden": opt.hidden, "envvar": opt.env, "show_envvar": not has_usual_name}
        shown["help"] = opt.help.replace("[", "\\[")  # A bracket would be markup to rich.
        if opt.positional:
            declared = typer.Argument(..., metavar=opt.metavar, **shown)
        else:
            names = [f"{opt.flag}/{opt.negative_flag}" if opt.is_negatable else opt.flag, *filter(None, [opt.short])]
            value: Any = opt.default
            shown["metavar"] = " "
            if not opt.is_switch:
                shown["metavar"] = "<" + ("|".join(opt.choices) or opt.unit or _KINDS.get(opt.item, "text")) + ">"
                value = None if opt.default in (None, [], ()) else _shown_default(opt)
            show_default = not opt.is_switch and value is not None
            declared = typer.Option(value, *names, show_default=show_default, rich_help_panel=opt.panel, **shown)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(opt.name, kind, default=declared, annotation=annotation))

    def command(**_: Any) -> None: ...

    if any(opt.env == opt.name.upper() for opt in options):
        description += (
            "\n\nAn option is also read from the environment variable of its name (--max-batch-size from "
            "MAX_BATCH_SIZE); the command line wins."
        )
    if any(opt.unit for opt in options):
        description += "\n\n" + sizes.MEANING
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = description
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command()(command)
    try:
        app(args=["--help"], prog_name=prog, standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich makes the one the other
        # A reader that has seen enough (`| head`) is no error; the interpreter's own flush would be the next.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _shown_default(opt: Option) -> str:
    return ",".join(map(spell, opt.default)) if opt.is_repeated else spell(opt.default)
