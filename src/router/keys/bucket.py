"""A limit a minute that refills continuously."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

Clock = Callable[[], float]


class Bucket:
    """Holds at most one minute's worth; below zero what was taken beyond it is paid back first."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self.per_minute / 60, float(self.per_minute))
        self._at = now
        return self._level

    @property
    def full_in_s(self) -> float:
        """Return the seconds until it is full."""
        return (self.per_minute - self.level) * 60 / self.per_minute

    def charge(self, amount: float) -> None:
        self._level = self.level - amount

    def wait_s(self, amount: float) -> float:
        """Return the seconds until it holds `amount`."""
        return max(amount - self.level, 0.0) * 60 / self.per_minute

    def changed(self, per_minute: int) -> None:
        """Continue with another limit, and what has been taken."""
        taken = self.per_minute - self.level
        self.per_minute = per_minute
        self._level = per_minute - taken


def spelled_wait(seconds: float) -> str:
    """Spell a time as OpenAI's headers do: `6m0s`, `1.5s`, `120ms`."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest // 1000}s" if minutes else f"{rest / 1000:g}s"
