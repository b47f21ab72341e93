"""How an option is declared: config field ⇄ flag ⇄ environment variable, once.

A config is a frozen, keyword-only dataclass of `option()` and `argument()`, from which parser, `--help` and documents
come. Annotations are resolved at run time, so their names must be imported.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

from wire.cli.sizes import Unit
from wire.cli.spelling import flag_of, variable_of

_KEY = "wire.option"


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
    has_flag: bool = True
    header: bool = False
    unit: Unit | None = None
    alone: str | None = None
    is_config_file: bool = False


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
    has_flag: bool
    """A positional argument may have one too."""
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
    header: bool
    """Its value travels in an HTTP header."""
    unit: Unit | None
    """What an `int` counts, if it may be written as 8k or 1.5GiB."""
    alone: str | None
    """The value of the flag without one, where it may be left out."""
    is_config_file: bool
    """Names a file with the values of other options."""

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
    header: bool = False,
    unit: Unit | None = None,
    alone: str | None = None,
    is_config_file: bool = False,
) -> Any:
    """Declare an option: flag `--field-name`, variable `FIELD_NAME`.

    Types: `bool`, `bool | None` (true/false), `int`, `float`, `str`, `Path`, `Literal`, an Enum, `| None`, or
    repeatable lists and tuples of them.

    Args:
        env: Another variable; None: none.
        short: One letter.
        separator: Cuts values of lists.
        negatable: A switch with `--no-x`, as those that are on.
        header: Only what an HTTP header can hold.
        unit: An `int` such as 8k or 1.5GiB.
        alone: What the flag without a value means.
        is_config_file: A YAML file with other options.
    """
    declared = _Declared(
        help=help, env=env, short=short, panel=panel, metavar=metavar, hidden=hidden,
        minimum=minimum, maximum=maximum, separator=separator, negatable=negatable, header=header,
        unit=unit, alone=alone, is_config_file=is_config_file,
    )  # fmt: skip
    return _field(default, declared)


def argument(
    *,
    help: str,
    default: Any = dataclasses.MISSING,
    env: str | None = None,
    metavar: str | None = None,
    has_flag: bool = False,
) -> Any:
    """Declare a positional argument, required without a default; a list takes the rest.

    Args:
        has_flag: Also given as `--field-name`.
    """
    declared = _Declared(help=help, env=env, metavar=metavar, positional=True, has_flag=has_flag)
    return _field(default, declared)


def _field(default: Any, declared: _Declared) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={_KEY: declared})
    return dataclasses.field(default=default, metadata={_KEY: declared})


def options_of(config_type: type) -> tuple[Option, ...]:
    """The options of a config in the order of its fields, those that it inherits last."""
    hints = typing.get_type_hints(config_type)
    names = dict.fromkeys(name for one in config_type.__mro__ for name in inspect.get_annotations(one))
    fields = {field.name: field for field in dataclasses.fields(config_type)}
    return tuple(_option_of(fields[name], hints[name]) for name in names if name in fields)


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
        flag=flag_of(field.name),
        short="-" + declared.short.lstrip("-") if declared.short else None,
        env=variable_of(field.name) if isinstance(declared.env, EllipsisType) else declared.env,
        help=declared.help,
        panel=declared.panel,
        metavar=declared.metavar or ("|".join(choices) if choices else field.name.upper()),
        hidden=declared.hidden,
        default=default,
        positional=declared.positional,
        has_flag=declared.has_flag,
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
        header=declared.header,
        unit=declared.unit,
        alone=declared.alone,
        is_config_file=declared.is_config_file,
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
