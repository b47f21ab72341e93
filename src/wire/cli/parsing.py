"""From a command line and an environment to a config, by the rules of TGI's parser (clap).

Command line > environment > config file > default; exact names; no repeated values; unsigned integers. Typer only draws
the help: it keeps the last repetition, and cannot name a bad variable.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from wire.cli import config_file
from wire.cli.options import Option, options_of
from wire.cli.other_servers.words import option_hint, value_hint
from wire.cli.sizes import count_of
from wire.cli.spelling import closest, spell

T = TypeVar("T")
logger = logging.getLogger(__name__)

UNSIGNED_MAX = 2**64 - 1
"""Upper bound of an `int` option that names none (clap's usize on 64-bit machines)."""
FLOAT_MAX = 3.4028234663852886e38
"""Upper bound of a `float` option that names none, and less than its negative is refused too (clap's f32)."""

_HEADER_TEXT = re.compile(r"([!-~]([ -~]*[!-~])?)?")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class UsageError(Exception):
    """The options cannot be understood: value, option and reason."""


def parse(config_type: type[T], argv: Sequence[str], environ: Mapping[str, str]) -> T:
    """Return the config of `argv` (without the program), `environ`, and their config file.

    `handed_on` names variables for other programs.
    """
    options = options_of(config_type)
    given = _read_argv(options, argv, getattr(config_type, "handed_on", ()))
    path, in_file = _read_config_file(options, given, environ)
    values: dict[str, Any] = {}
    for opt in options:
        if opt.name in given:
            values[opt.name] = value_of(opt, given[opt.name], source="")
        elif (text := _from_environment(opt, environ)) is not None:
            values[opt.name] = value_of(opt, [text], source=f" (from the environment variable {opt.env})")
        elif (of_file := in_file.get(opt.name)) is not None:
            values[opt.name] = value_of(opt, of_file.texts, source=f" (from {path}, line {of_file.line})")
        elif opt.required:
            meaning = opt.help.rstrip(".")
            raise UsageError(f"the following required argument was not provided: {opt.label} ({meaning})")
    return config_type(**values)


def values_of(options: Sequence[Option], given: Mapping[str, config_file.Given], path: Path) -> dict[str, Any]:
    """Return the values of a file's options by field. Raises UsageError."""
    known = {opt.name: opt for opt in options}
    return {
        name: value_of(known[name], said.texts, source=f" (from {path}, line {said.line})")
        for name, said in given.items()
    }


def _read_config_file(
    options: Sequence[Option], given: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> tuple[Path | None, Mapping[str, config_file.Given]]:
    """Its path and, by field name, what it says; nothing where none is named. Raises UsageError."""
    for opt in options:
        if opt.is_config_file and (
            text := given[opt.name][0] if opt.name in given else _from_environment(opt, environ)
        ):
            path = Path(os.path.expanduser(text))  # Path's own raises where there is no such user
            try:
                return path, config_file.read(path, options)
            except ValueError as error:
                raise UsageError(f"{opt.flag}: {error}") from None
    return None, {}


def _from_environment(opt: Option, environ: Mapping[str, str]) -> str | None:
    text = environ.get(opt.env, "") if opt.env else ""
    if opt.item is int and text.startswith("tcp://"):
        # Kubernetes exports PORT-like variables for each service of the namespace; they are not meant for us.
        logger.warning("ignoring the environment variable %s=%s: not a number for %s", opt.env, text, opt.flag)
        return None
    return text or None


def _read_argv(options: Sequence[Option], argv: Sequence[str], handed_on: Collection[str] = ()) -> dict[str, list[str]]:
    """Field name → the texts given for it; a switch is recorded as "true" or "false"."""
    flags = {opt.flag: opt for opt in options if opt.has_flag}
    negatives = {opt.negative_flag: opt for opt in options if opt.is_negatable}
    shorts = {opt.short: opt for opt in options if opt.short}
    positionals = [opt for opt in options if opt.positional]
    given: dict[str, list[str]] = {}

    def record(opt: Option, text: str) -> None:
        if opt.name in given and not opt.is_repeated:
            raise UsageError(f"the argument '{opt.label}' cannot be used multiple times")
        given.setdefault(opt.name, []).append(text)

    words = iter(_with_values(argv, flags))
    only_positionals = False
    for word in words:
        if only_positionals or not word.startswith("-") or word == "-":
            if not positionals:
                raise UsageError(f"unexpected argument '{word}' found{_joined(given, options, word)}")
            record(positionals[0] if positionals[0].is_repeated else positionals.pop(0), word)
        elif word == "--":
            only_positionals = True
        elif word.startswith("--"):
            flag, equals, text = word.partition("=")
            if (opt := flags.get(flag)) and not opt.is_switch:
                record(opt, text if equals else _next_value(opt, words))
            elif (opt := flags.get(flag) or negatives.get(flag)) is None:
                hint = option_hint(flag, flags) or _variable(flag, handed_on) or _similar(flag, [*flags, *negatives])
                if not hint and positionals and positionals[-1].is_repeated:
                    theirs = option_hint(flag, None)
                    hint = (
                        f"{theirs}, behind '--' with {positionals[-1].label}"
                        if theirs
                        else (f"; write '-- {flag}' to hand it on as one of {positionals[-1].label}")
                    )
                raise UsageError(f"unexpected argument '{flag}' found{hint}")
            elif equals:
                raise UsageError(f"unexpected value '{text}' for '{flag}' found; no more were expected")
            else:
                record(opt, "true" if flag in flags else "false")
        else:
            if word[:2] not in shorts and (hint := option_hint(word.partition("=")[0], flags)):
                raise UsageError(f"unexpected argument '{word}' found{hint}")
            _read_shorts(word, shorts, words, record)
    return given


def _with_values(argv: Sequence[str], flags: Mapping[str, Option]) -> Iterator[str]:
    """Write out the value of each flag that comes without one and may."""
    for word, after in zip(argv, [*argv[1:], "-"], strict=False):
        opt = flags.get(word)
        yield word if opt is None or opt.alone is None or not after.startswith("-") else f"{word}={opt.alone}"


def _joined(given: Mapping[str, Sequence[str]], options: Sequence[Option], word: str) -> str:
    """How to give a list to the option before `word`, if that takes one."""
    before = next((opt for opt in options if given and opt.name == [*given][-1]), None)
    if before is None or not before.separator:
        return ""
    return f"; several values are written as '{before.flag} {before.separator.join((given[before.name][-1], word))}'"


def _variable(flag: str, handed_on: Collection[str]) -> str:
    name = flag.removeprefix("--").replace("-", "_").upper()
    return f"; set the variable {name}, which is handed on" if name in handed_on else ""


def _similar(flag: str, known: Sequence[str]) -> str:
    found = closest(flag, known, letters_per_edit=3)
    return f"; a similar one exists: '{found}'" if found else ""


def _read_shorts(
    word: str, shorts: Mapping[str, Option], words: Iterator[str], record: Callable[[Option, str], None]
) -> None:
    """`-e`, `-p 80`, `-p80`, `-p=80`, `-ep80`."""
    for index, letter in enumerate(word[1:], start=2):
        opt = shorts.get("-" + letter)
        if opt is None:
            raise UsageError(f"unexpected argument '-{letter}' found")
        if not opt.is_switch:
            rest = word[index:].removeprefix("=")
            return record(opt, rest if word[index:] else _next_value(opt, words))
        record(opt, "true")


def _next_value(opt: Option, words: Iterator[str]) -> str:
    text = next(words, None)
    # A dash starts the next option, except in a number (which the range check then refuses in its own words).
    if text is None or (text.startswith("-") and not re.fullmatch(r"-|-\.?\d.*", text)):
        name = f"{opt.flag} <{opt.metavar}>" if opt.positional else opt.label
        raise UsageError(f"a value is required for '{name}' but none was supplied")
    return text


def value_of(opt: Option, texts: Sequence[str], *, source: str) -> Any:
    if opt.separator:
        texts = [part.strip() for text in texts for part in text.split(opt.separator) if part.strip()]
    values = []
    for text in texts:
        try:
            values.append(_convert(opt, text))
        except ValueError as error:
            if opt.header:  # it may be a key
                raise UsageError(f"invalid value for '{opt.label}'{source}: {error}") from None
            raise UsageError(f"invalid value '{text}' for '{opt.label}'{source}: {error}") from None
    return opt.container(values) if opt.is_repeated else values[0]


def _convert(opt: Option, text: str) -> Any:
    """One value. Raises ValueError with the reason."""
    if opt.choices:
        if text not in opt.choices:
            raise ValueError(f"possible values: {', '.join(opt.choices)}{value_hint(opt.flag, text)}")
        return opt.item(text)
    if opt.item is bool:
        word = text.lower()
        if word not in _TRUE | _FALSE:
            raise ValueError("expected true or false")
        return word in _TRUE
    if opt.item is int:
        if re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            return _in_range(opt, int(text), 0, UNSIGNED_MAX)
        if opt.unit is None:
            raise ValueError("expected a whole number")
        return _in_range(opt, count_of(text, opt.unit), 0, UNSIGNED_MAX)
    if opt.item is float:
        try:
            number = float(text) if "_" not in text else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError("expected a number")
        return _in_range(opt, number, -FLOAT_MAX, FLOAT_MAX)
    if opt.header and not _HEADER_TEXT.fullmatch(text):
        raise ValueError("expected printable ASCII characters, with no space at either end")
    return opt.item(text)


def _in_range(opt: Option, number: float, low: float, high: float) -> float:
    low = opt.minimum if opt.minimum is not None else low
    high = opt.maximum if opt.maximum is not None else high
    if not low <= number <= high:
        raise ValueError(f"{spell(number)} is not in {spell(low)}..={spell(high)}")
    return number
