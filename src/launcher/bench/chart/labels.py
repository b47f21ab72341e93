"""Where the labels of points are written, so that they cover neither each other nor the curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.bench.chart.svg import text_width

_HEIGHT, _GAP = 13.0, 7.0
_DOT = 4.0
# Pixels between the places of a line that a label is to leave free.
_STEP = 5.0

Place = tuple[float, float]


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def is_in(self, other: Box) -> bool:
        return (
            other.left <= self.left and self.right <= other.right and other.top <= self.top
            and self.bottom <= other.bottom
        )  # fmt: skip


def place_labels(points: Sequence[tuple[Place, str]], lines: Sequence[Sequence[Place]], area: Box) -> list[Box | None]:
    """Place each point's label beside it, inside `area` and over as little of the lines as possible.

    Returns:
        The boxes; None for a label without room.
    """
    dots = [Box(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for line in lines for x, y in line]
    taken = [box for line in lines for box in _along(line)]
    placed: list[Box | None] = []
    for place, words in points:
        candidates = [box for box in _around(place, text_width(words)) if box.is_in(area)] or [
            next(_around(place, text_width(words)))
        ]
        occupied = [*dots, *filter(None, placed)]
        free = [box for box in candidates if not any(map(box.overlaps, occupied))]
        placed.append(min(free, key=lambda box: sum(map(box.overlaps, taken)), default=None))
    return placed


def _around(place: Place, width: float) -> Iterator[Box]:
    """Candidates, the best first: a curve of throughput against latency leaves its upper left free."""
    x, y = place
    above, beside, below = y - _GAP - _HEIGHT, y - _HEIGHT / 2, y + _GAP
    left, centre, right = x - _GAP - width, x - width / 2, x + _GAP
    for corner_x, corner_y in (
        (left, above), (centre, above), (left, beside), (right, below), (centre, below), (right, beside),
        (left, below), (right, above),
    ):  # fmt: skip
        yield Box(corner_x, corner_y, corner_x + width, corner_y + _HEIGHT)


def _along(line: Sequence[Place]) -> Iterator[Box]:
    """Small boxes that cover a line."""
    for (x1, y1), (x2, y2) in zip(line, line[1:] or line, strict=False):
        count = max(1, round(math.hypot(x2 - x1, y2 - y1) / _STEP))
        for part in range(count + 1):
            x, y = x1 + (x2 - x1) * part / count, y1 + (y2 - y1) * part / count
            yield Box(x - 3, y - 3, x + 3, y + 3)
