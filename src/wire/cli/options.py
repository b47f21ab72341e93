"""How an option is spelled: config field ⇄ flag ⇄ environment variable ⇄ argv, each option declared once.

A process' config is a frozen, keyword-only dataclass whose fields are made with `option()` or `argument()`; from it
come the parser, the `--help` page and (`to_argv`) the command line of a child. Knows no particular option.

The rules are those of TGI's parser (clap): command line > environment > default; exact long names; a single-valued
option given twice is an error; switches take no value; integers are unsigned. Typer draws the help page but does not
parse: it takes the last of two repeated options, reads `os.environ` itself, and cannot name the variable that held a
bad value.

Annotations are resolved at run time: a config module must import the names it annotates with, outside TYPE_CHECKING.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

UNSIGNED_MAX = 2**64 - 1
"""Upper bound of an `int` option that names none (clap's usize on 64-bit machines)."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_KEY = "wire.option"


class UsageError(Exception):
    """The command line or the environment cannot be understood; the text names the value, the option and the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Declared:
    """What the author of a config wrote; the rest of `Option` follows from the field."""

    help: str
    env: str | EllipsisType | None = ...
    short: str | None = None
    panel: str | None = None
    metavar: str | None = None
    hidden: bool = False
    minimum: float | None = None
    maximum: float | None = None
    separator: str | None = None
    negatable: bool = False
    positional: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option as the parser, the help page and the documentation see it."""

    name: str
    """Field name."""
    flag: str
    short: str | None
    env: str | None
    help: str
    panel: str | None
    metavar: str
    hidden: bool
    default: Any
    positional: bool
    required: bool
    item: type
    """Type of one value: bool, int, float, str, Path or an Enum class."""
    choices: tuple[str, ...]
    is_switch: bool
    """Takes no value on the command line."""
    is_negatable: bool
    """A switch that `--no-<flag>` turns off."""
    is_repeated: bool
    container: Callable[[Sequence[Any]], Any]
    separator: str | None
    minimum: float | None
    maximum: float | None

    @property
    def label(self) -> str:
        if self.positional:
            return f"<{self.metavar}>"
        return self.flag if self.is_switch else f"{self.flag} <{self.metavar}>"

    @property
    def negative_flag(self) -> str:
        return "--no-" + self.flag.removeprefix("--")


def option(
    default: Any,
    *,
    help: str,
    env: str | EllipsisType | None = ...,
    short: str | None = None,
    panel: str | None = None,
    metavar: str | None = None,
    hidden: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    separator: str | None = None,
    negatable: bool = False,
) -> Any:
    """A config field that is an option: flag `--field-name`, variable `FIELD_NAME` unless `env` says otherwise.

    `env=None`: no variable. `short`: one letter, with or without its dash. Annotations: `bool` (a switch; `--no-x`
    exists if it is on by default or `negatable`), `bool | None` (takes true/false), `int`, `float`, `str`, `Path`,
    `Literal[...]`, an Enum, each `| None`, or `list[...]` / `tuple[..., ...]` of them: repeatable, and cut at
    `separator` if one is given.
    """
    declared = _Declared(
        help=help, env=env, short=short, panel=panel, metavar=metavar, hidden=hidden,
        minimum=minimum, maximum=maximum, separator=separator, negatable=negatable,
    )  # fmt: skip
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={_KEY: declared})
    return dataclasses.field(default=default, metadata={_KEY: declared})


def argument(*, help: str, env: str | None = None, metavar: str | None = None) -> Any:
    """A config field that is a required positional argument (or its variable, if one is named)."""
    return dataclasses.field(metadata={_KEY: _Declared(help=help, env=env, metavar=metavar, positional=True)})


def options_of(config_type: type) -> tuple[Option, ...]:
    """The options of a config, in the order of its fields."""
    hints = typing.get_type_hints(config_type)
    return tuple(_option_of(field, hints[field.name]) for field in dataclasses.fields(config_type))


def _option_of(field: dataclasses.Field[Any], annotation: Any) -> Option:
    declared = field.metadata.get(_KEY)
    if not isinstance(declared, _Declared):
        raise TypeError(f"field {field.name} is neither option() nor argument()")
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    inner = next(member for member in members if member is not types.NoneType)
    is_optional = len(members) > 1
    container: Callable[[Sequence[Any]], Any] = list
    is_repeated = typing.get_origin(inner) in (list, tuple)
    if is_repeated:
        container = typing.get_origin(inner)
        inner = typing.get_args(inner)[0]
    item, choices = _item_of(inner)
    default, required = field.default, False
    if default is dataclasses.MISSING:
        required = field.default_factory is dataclasses.MISSING
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    is_switch = item is bool and not is_optional and not is_repeated
    return Option(
        name=field.name,
        flag="--" + field.name.replace("_", "-"),
        short="-" + declared.short.lstrip("-") if declared.short else None,
        env=field.name.upper() if isinstance(declared.env, EllipsisType) else declared.env,
        help=declared.help,
        panel=declared.panel,
        metavar=declared.metavar or ("|".join(choices) if choices else field.name.upper()),
        hidden=declared.hidden,
        default=default,
        positional=declared.positional,
        required=required,
        item=item,
        choices=choices,
        is_switch=is_switch,
        is_negatable=is_switch and (declared.negatable or default is True),
        is_repeated=is_repeated,
        container=container,
        separator=declared.separator,
        minimum=declared.minimum,
        maximum=declared.maximum,
    )


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _item_of(inner: Any) -> tuple[type, tuple[str, ...]]:
    if typing.get_origin(inner) is typing.Literal:
        return str, tuple(typing.get_args(inner))
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return inner, tuple(str(member.value) for member in inner)
    if inner in (bool, int, float, str, Path):
        return inner, ()
    raise TypeError(f"{inner!r} is not a type that an option can have")


def parse(config_type: type[T], argv: Sequence[str], environ: Mapping[str, str]) -> T:
    """The config that `argv` (without the program) and `environ` ask for. Pure. Raises UsageError."""
    options = options_of(config_type)
    given = _read_argv(options, argv)
    values: dict[str, Any] = {}
    for opt in options:
        if opt.name in given:
            values[opt.name] = _value_of(opt, given[opt.name], source="")
        elif (text := _from_environment(opt, environ)) is not None:
            values[opt.name] = _value_of(opt, [text], source=f" (from the environment variable {opt.env})")
        elif opt.required:
            raise UsageError(f"the following required argument was not provided: {opt.label}")
    return config_type(**values)


def _from_environment(opt: Option, environ: Mapping[str, str]) -> str | None:
    text = environ.get(opt.env, "") if opt.env else ""
    if opt.item is int and text.startswith("tcp://"):
        # Kubernetes exports PORT-like variables for each service of the namespace; they are not meant for us.
        logger.warning("ignoring the environment variable %s=%s: not a number for %s", opt.env, text, opt.flag)
        return None
    return text or None


def _read_argv(options: Sequence[Option], argv: Sequence[str]) -> dict[str, list[str]]:
    """Field name → the texts given for it; a switch is recorded as "true" or "false"."""
    flags = {opt.flag: opt for opt in options if not opt.positional}
    negatives = {opt.negative_flag: opt for opt in options if opt.is_negatable}
    shorts = {opt.short: opt for opt in options if opt.short}
    positionals = [opt for opt in options if opt.positional]
    given: dict[str, list[str]] = {}

    def record(opt: Option, text: str) -> None:
        if opt.name in given and not opt.is_repeated:
            raise UsageError(f"the argument '{opt.label}' cannot be used multiple times")
        given.setdefault(opt.name, []).append(text)

    words = iter(argv)
    only_positionals = False
    for word in words:
        if only_positionals or not word.startswith("-") or word == "-":
            if not positionals:
                raise UsageError(f"unexpected argument '{word}' found")
            record(positionals.pop(0), word)
        elif word == "--":
            only_positionals = True
        elif word.startswith("--"):
            flag, equals, text = word.partition("=")
            if (opt := flags.get(flag)) and not opt.is_switch:
                record(opt, text if equals else _next_value(opt, words))
            elif (opt := flags.get(flag) or negatives.get(flag)) is None:
                raise UsageError(f"unexpected argument '{flag}' found{_similar(flag, [*flags, *negatives])}")
            elif equals:
                raise UsageError(f"unexpected value '{text}' for '{flag}' found; no more were expected")
            else:
                record(opt, "true" if flag in flags else "false")
        else:
            _read_shorts(word, shorts, words, record)
    return given


def _similar(flag: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches  # only after a mistake

    # TGI's users write underscores; so do its variables.
    found = get_close_matches(flag.lower().replace("_", "-"), known, n=1)
    return f"; a similar one exists: '{found[0]}'" if found else ""


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
        raise UsageError(f"a value is required for '{opt.label}' but none was supplied")
    return text


def _value_of(opt: Option, texts: Sequence[str], *, source: str) -> Any:
    if opt.separator:
        texts = [part.strip() for text in texts for part in text.split(opt.separator) if part.strip()]
    values = []
    for text in texts:
        try:
            values.append(_convert(opt, text))
        except ValueError as error:
            raise UsageError(f"invalid value '{text}' for '{opt.label}'{source}: {error}") from None
    return opt.container(values) if opt.is_repeated else values[0]


def _convert(opt: Option, text: str) -> Any:
    """One value. Raises ValueError with the reason."""
    if opt.choices:
        if text not in opt.choices:
            raise ValueError(f"possible values: {', '.join(opt.choices)}")
        return opt.item(text)
    if opt.item is bool:
        word = text.lower()
        if word not in _TRUE | _FALSE:
            raise ValueError("expected true or false")
        return word in _TRUE
    if opt.item is int:
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
            raise ValueError("expected a whole number")
        return _in_range(opt, int(text), 0, UNSIGNED_MAX)
    if opt.item is float:
        try:
            number = float(text) if "_" not in text else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError("expected a number")
        return _in_range(opt, number, None, None)
    return opt.item(text)


def _in_range(opt: Option, number: float, low: float | None, high: float | None) -> float:
    low = opt.minimum if opt.minimum is not None else low
    high = opt.maximum if opt.maximum is not None else high
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"{spell(low)}..={spell(high)}" if high is not None else f"at least {spell(low)}"
        raise ValueError(f"{spell(number)} is not in {bounds}" if high is not None else f"must be {bounds}")
    return number


def spell(value: Any) -> str:
    """A value as the command line spells it; floats as TGI prints them (1.0 → `1`)."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def to_argv(config: Any) -> list[str]:
    """The argv that makes `parse` return `config` in an environment that sets none of its variables.

    Only values that differ from the defaults are spelled. A child that inherits variables of the same names would take
    those for the omitted ones: the caller either removes them or spells such options itself.
    """
    argv: list[str] = []
    positionals: list[str] = []
    for opt in options_of(type(config)):
        value = getattr(config, opt.name)
        if opt.positional:
            positionals.append(str(value))
        elif value is None or value == opt.default:
            continue
        elif opt.is_switch:
            argv.append(opt.flag if value else opt.negative_flag)
        else:
            for item in value if opt.is_repeated else [value]:
                # One word, so that a value that starts with a dash cannot be taken for an option.
                text = spell(item)
                argv += [f"{opt.flag}={text}"] if text.startswith("-") else [opt.flag, text]
    if any(text.startswith("-") for text in positionals):
        argv.append("--")
    return argv + positionals
