"""Command: what the planning hands to the code that starts the processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Command:
    """How to start one child, and how to know that it is ready."""

    name: str
    """`download`, `shard` or `router`."""
    argv: tuple[str, ...]
    env: Environment
    rank: int | None = None
    socket: str | None = None
    """Ready when gRPC Health is answered here."""
    http: tuple[str, int] | None = None
    """Ready when GET /health is answered with 200 here."""
    private_files: bool = False
    """Only its user may read files that it creates (the mode of a socket follows from this)."""

    @property
    def title(self) -> str:
        return self.name if self.rank is None else f"{self.name} {self.rank}"
