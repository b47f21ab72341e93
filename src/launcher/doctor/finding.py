"""One thing that was looked at, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """warning: serving works, but worse than it could; error: it does not work until `remedy` is done."""

    name: str
    state: State = "ok"
    text: str
    """One line: what was found."""
    remedy: str = ""
    """A command, or what to change; empty where nothing is to be done."""
