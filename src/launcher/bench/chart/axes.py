"""The axis of some values: its ends, its round numbers, and where a value is on it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_TICKS = 6
# Values that differ by more than this factor are put on a logarithmic axis, where one is allowed.
_LINEAR_FACTOR = 10


@dataclass(frozen=True)
class Axis:
    """ticks: round numbers in ascending order, the first and the last of which are the ends of the axis."""

    ticks: tuple[float, ...]
    is_logarithmic: bool = False

    def share(self, value: float) -> float:
        """0 at the start of the axis, 1 at its end."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.is_logarithmic:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def labels(self) -> list[str]:
        return [f"{tick:,.10g}" for tick in self.ticks]


def linear(values: Sequence[float]) -> Axis:
    """From 0 to the first round number that is no less than any value."""
    most = max(values, default=0.0) or 1.0
    rough = most / (_MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 2.5, 5, 10) if (step := factor * power) >= rough * (1 - 1e-9))
    count = math.ceil(most / step - 1e-9)
    return Axis(tuple(round(step * number, 12) for number in range(count + 1)))


def linear_or_logarithmic(values: Sequence[float]) -> Axis:
    """Logarithmic where a linear axis would press the small values together."""
    least, most = min(values, default=0.0), max(values, default=0.0)
    if least <= 0 or most <= _LINEAR_FACTOR * least:
        return linear(values)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = _decades(least, most, factors)
        if len(ticks) <= _MOST_TICKS + 1:
            break
    return Axis(ticks, is_logarithmic=True)


def _decades(least: float, most: float, factors: Sequence[int]) -> tuple[float, ...]:
    """These multiples of powers of ten, from the last below `least` to the first above `most`."""
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    ticks = [float(f"{factor}e{power}") for power, factor in itertools.product(powers, factors)]
    first = max(number for number, tick in enumerate(ticks) if tick <= least)
    last = min(number for number, tick in enumerate(ticks) if tick >= most)
    return tuple(ticks[first : last + 1])
