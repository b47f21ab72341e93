"""What the scheduler needs from its neighbours, as protocols: something to count with."""

from __future__ import annotations

from typing import Protocol


class Metrics(Protocol):
    """The part of `router.metrics` that the scheduler writes; names are TGI's."""

    def count(self, name: str, value: float = 1, **labels: str) -> None: ...

    def observe(self, name: str, value: float, times: int = 1, **labels: str) -> None: ...

    def gauge(self, name: str, value: float) -> None: ...
