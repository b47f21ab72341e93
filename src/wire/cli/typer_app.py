"""`--help` and shell completion by typer, imported only for these."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wire.cli import sizes
from wire.cli.options import Option, options_of
from wire.cli.spelling import spell

if TYPE_CHECKING:
    import typer

Commands = Mapping[str, tuple[type[Any], Callable[[Any], int]]]
"""Name → config and function, whose first line of documentation says what the command does."""
Values = Mapping[str, Callable[[], Sequence[str]]]
"""Field name → what finds values for it that the shell completes, beside the choices that an option declares."""

_KINDS = {int: "int", float: "float", Path: "path", bool: "true|false"}


def print_help(config_type: type, prog: str, description: str, commands: Commands) -> None:
    """Writes the page to standard output. `commands`: the commands, which the page lists after the options."""
    # Read by typer when it is imported. In a pipe the default would be 80 columns, which cut long option names.
    if not sys.stdout.isatty():
        os.environ.setdefault("TERMINAL_WIDTH", "120")
    try:
        _app_of(config_type, description, commands, {})(args=["--help"], prog_name=prog, standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich makes the one the other
        # A reader that has seen enough (`| head`) is no error; the interpreter's own flush would be the next.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complete(config_type: type, prog: str, commands: Commands, words: Sequence[str], values: Values) -> int:
    """Answer typer's completion by variable or `words`; return the exit status."""
    try:
        _app_of(config_type, "", commands, values)(args=list(words), prog_name=prog)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def summary(run: Callable[[Any], int]) -> str:
    return (run.__doc__ or "").partition("\n")[0]


def _app_of(config_type: type, description: str, commands: Commands, values: Values) -> typer.Typer:
    import typer

    names = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(add_completion=bool(commands), context_settings=names)
    main = _function_of(config_type, description, values)
    if not commands:
        app.command()(main)
        return app
    app.callback(invoke_without_command=True)(main)
    for name, (kind, run) in commands.items():
        app.command(name, context_settings=names)(_function_of(kind, summary(run), values))
    return app


def _function_of(config_type: type, description: str, values: Values) -> Callable[..., None]:
    """A function with the signature and the documentation from which typer makes a command."""
    import typer

    options = options_of(config_type)
    parameters = []
    for opt in options:
        # Each value is text to typer, whatever its type: ranges and choices are said by our own metavar and parser.
        annotation: Any = bool if opt.is_switch else str
        has_usual_name = opt.env == opt.name.upper()
        shown: dict[str, Any] = {"hidden": opt.hidden, "envvar": opt.env, "show_envvar": not has_usual_name}
        shown["help"] = opt.help.replace("[", "\\[")  # A bracket would be markup to rich.
        if opt.choices or opt.name in values:
            shown["autocompletion"] = _completion_of(opt.choices, values.get(opt.name))
        if opt.positional:
            declared = typer.Argument(... if opt.required else None, metavar=opt.metavar, **shown)
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
    return command


def _completion_of(choices: Sequence[str], find: Callable[[], Sequence[str]] | None) -> Callable[[str], list[str]]:
    """Complete by `find`; without results shells complete file names."""
    return lambda incomplete: [one for one in (find() if find else choices) if one.startswith(incomplete)]


def _shown_default(opt: Option) -> str:
    return ",".join(map(spell, opt.default)) if opt.is_repeated else spell(opt.default)
