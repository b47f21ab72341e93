"""Configs with one field for every way to declare an option."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Literal

from wire.cli.options import argument, option


class Colour(enum.Enum):
    RED = "red"
    DARK_BLUE = "dark-blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    max_batch_size: int | None = option(None, help="n", maximum=1000)
    port: int = option(3000, help="p", short="p", maximum=65535)
    ratio: float = option(0.3, help="r", minimum=0.0)
    name: str = option("bloom", help="s")
    cache: Path | None = option(None, help="c")
    json_output: bool = option(False, help="j", short="-j")
    convert: bool = option(True, help="on by default")
    sharded: bool | None = option(None, help="true or false")
    quiet: bool = option(False, help="q", negatable=True)
    dtype: Literal["float16", "bfloat16"] | None = option(None, help="d")
    colour: Colour = option(Colour.RED, help="e")
    origin: list[str] = option([], help="list")
    graphs: tuple[int, ...] = option((), help="tuple", separator=",")
    report: bool = option(False, help="no variable", env=None, short="e")
    cuts: Literal["true", "false"] = option("false", help="a value may follow", alone="true")
    tokens: int | None = option(None, help="t", unit="tokens", minimum=1)
    size: int = option(10, help="b", unit="bytes", maximum=2**40)
    file: Path | None = option(None, help="f", env="CONFIG_FILE", is_config_file=True)
    special: str | None = option(None, help="own variable", env="OTHER_NAME")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Positional:
    model_id: str = argument(help="m")
    revision: str | None = option(None, help="r")
