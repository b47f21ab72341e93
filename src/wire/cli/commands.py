"""From a command line to a command: help, version, usage errors and exit statuses, around `wire.cli.parsing.parse`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from wire.cli.options import options_of
from wire.cli.parsing import UsageError, parse, value_of
from wire.cli.spelling import closest
from wire.cli.typer_app import Commands, Values, complete, print_help, summary
from wire.text.escape import as_error, shown_in_line

T = TypeVar("T")
Version = str | Callable[[], str] | None
"""A version, or what finds it when it is asked for: looking into the installed packages takes its time."""


def run_command(
    config_type: type[T],
    run: Callable[[T], int],
    *,
    prog: str,
    argv: Sequence[str] | None = None,
    version: Version = None,
    description: str = "",
    commands: Commands | None = None,
) -> int:
    """Parse and run, and return the exit status; help goes to stdout, usage errors to stderr (2).

    Args:
        commands: Listed beside the options.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    before_dashes = words[: words.index("--")] if "--" in words else words
    if "--help" in before_dashes or "-h" in before_dashes:
        print_help(config_type, prog, description, commands or {})
        return 0
    if version is not None and ("--version" in before_dashes or "-V" in before_dashes):
        return _print_version(prog, version)
    try:
        config = parse(config_type, words, os.environ)
    except UsageError as error:
        return _refuse(prog, str(error))
    return run(config)


def run_group(
    commands: Commands,
    *,
    prog: str,
    argv: Sequence[str] | None = None,
    version: Version = None,
    description: str = "",
    default: tuple[type[Any], Callable[[Any], int]] | None = None,
    remedy: Callable[[str], str | None] = lambda word: None,
    values: Values | None = None,
) -> int:
    """Run the command that the first word names, else `default`.

    Args:
        remedy: What to do about a wrong first word, if anything.
        values: Completed by shells for some options.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in commands:
        config_type, run = commands[words[0]]
        return run_command(config_type, run, prog=f"{prog} {words[0]}", argv=words[1:], description=summary(run))
    if default is not None and (not words or words[0].startswith("-")):
        if words[:1] in (["--install-completion"], ["--show-completion"]) or _completion_variable(prog) in os.environ:
            return complete(default[0], prog, commands, words, values or {})
        return run_command(*default, prog=prog, argv=words, version=version, description=description, commands=commands)
    if words and words[0] in ("--help", "-h"):
        lines = [f"Usage: {prog} COMMAND ...", "", description, "", "Commands:"]
        lines += [f"  {name:<20}{summary(run)}" for name, (_, run) in commands.items()]
        print("\n".join([*lines, "", f"Options of a command: {prog} COMMAND --help"]))  # noqa: T201
        return 0
    if words and version is not None and words[0] in ("--version", "-V"):
        return _print_version(prog, version)
    if not words:
        return _refuse(prog, "a command is required")
    similar = closest(words[0], commands, letters_per_edit=3)
    hint = remedy(words[0]) or (
        f"a similar one exists: '{similar}'" if similar else f"'{prog} --help' lists the commands"
    )
    return _refuse(prog, f"unrecognized command '{words[0]}'; {hint}")


def with_variables(text: str, config: object, filled: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return an error's `text` with the variables that gave `config` the options which it names.

    Args:
        filled: Variables of other programs that gave an option its value, by its flag.
    """
    flags, given = re.findall(r"--[a-z][a-z0-9-]*", text), []
    for opt in options_of(type(config)):
        if opt.flag not in flags:
            continue
        if opt.env and (said := os.environ.get(opt.env)):
            with contextlib.suppress(UsageError):
                given += [opt.env] * (value_of(opt, [said], source="") == getattr(config, opt.name))
        if opt.flag in filled:
            given.append(filled[opt.flag])
    return f"{text} (from the environment: {', '.join(given)})" if given else text


def _completion_variable(prog: str) -> str:
    """Return the variable of typer's shell scripts."""
    return f"_{prog.replace('-', '_').upper()}_COMPLETE"


def installed_version() -> str:
    from importlib.metadata import version

    return version("tercet")


def _print_version(prog: str, version: str | Callable[[], str]) -> int:
    print(f"{prog} {version if isinstance(version, str) else version()}")  # noqa: T201
    return 0


def _refuse(prog: str, message: str) -> int:
    if sys.stderr.isatty():
        print(as_error(message), file=sys.stderr)  # noqa: T201
        return 2
    # The error last: supervisors and people read the end of a log.
    print(f"For more information, try '{prog} --help'.\n\nerror: {shown_in_line(message)}", file=sys.stderr)  # noqa: T201
    return 2
