"""A number that the launcher has decided on, with the rule that decided."""

from __future__ import annotations

from typing import NamedTuple


class Resolved(NamedTuple):
    """`reason` completes "N because of ..." in the log; `notes` are worth a warning each."""

    value: int
    reason: str
    notes: tuple[str, ...] = ()
