"""What `launcher keys` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wire.cli.options import argument


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """One key."""

    action: Literal["new"] = argument(metavar="new", help="`new` makes a key.")
    name: str = argument(metavar="NAME", help="Who has it: 1 to 64 of A-Z, a-z, 0-9, `_`, `.` and `-`.")
