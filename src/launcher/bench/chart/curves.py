"""Curves of points in panels beside each other, under a heading, over notes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.bench.chart.axes import Axis, linear, linear_or_logarithmic
from launcher.bench.chart.labels import Box, Place, place_labels
from launcher.bench.chart.svg import document, grid_line, series, text, text_width

_WIDTH, _MARGIN = 880, 20
_LEFT, _PLOT_WIDTH, _PLOT_HEIGHT, _BETWEEN = 80, 340, 270, 86
_BELOW = 46  # tick labels and the title of the x-axis
_LINE = 17
_HEADROOM = 22  # above a plot, for the labels of its uppermost points
_NOTE_LETTERS = 122


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str = ""


@dataclass(frozen=True)
class Curve:
    """number: of its series, which decides the colour. is_dashed: also drawn with hollow points."""

    name: str
    points: Sequence[Point]
    number: int = 0
    is_dashed: bool = False


@dataclass(frozen=True)
class CurvePanel:
    """Titles of axes name the unit."""

    x_title: str
    y_title: str
    curves: Sequence[Curve]


def curve_chart(heading: str, panels: Sequence[CurvePanel], labels: str, notes: Sequence[str]) -> str:
    """Draw at most two panels, which share their curves' names, and the notes below them.

    Args:
        labels: What the labels of points are, beside the names of the curves.
    """
    parts = []
    top = 12.0
    for number, line in enumerate(textwrap.wrap(heading, 96)):
        top += 20
        parts.append(text(_MARGIN, top, line, more=f'font-size="{15 if number == 0 else 13}" font-weight="bold"'))
    top += 24
    parts += _legend(panels[0].curves, labels, top)
    top += 24
    for number, panel in enumerate(panels):
        left = _LEFT + number * (_PLOT_WIDTH + _BETWEEN)
        parts += _panel(panel, Box(left, top, left + _PLOT_WIDTH, top + _PLOT_HEIGHT))
    top += _PLOT_HEIGHT + _BELOW
    for note in notes:
        for line in textwrap.wrap(note, _NOTE_LETTERS, break_on_hyphens=False):
            top += _LINE
            parts.append(text(_MARGIN, top, line, kind="pale", more='font-size="11.5"'))
    return document(_WIDTH, top + 14, parts)


def _legend(curves: Sequence[Curve], labels: str, y: float) -> Iterator[str]:
    x = float(_MARGIN)
    for curve in curves:
        yield series(
            curve.number, [_line([(x, y - 4), (x + 26, y - 4)], curve.is_dashed), _dot((x + 13, y - 4), curve)]
        )
        yield text(x + 32, y, curve.name)
        x += 32 + text_width(curve.name) + 18
    yield text(x, y, labels, kind="pale")


def _panel(panel: CurvePanel, area: Box) -> list[str]:
    points = [point for curve in panel.curves for point in curve.points]
    x_axis = linear_or_logarithmic([point.x for point in points])
    y_axis = linear([point.y for point in points])

    def place(point: Point) -> Place:
        return (
            area.left + x_axis.share(point.x) * (area.right - area.left),
            area.bottom - y_axis.share(point.y) * (area.bottom - area.top),
        )

    logarithmic = ", logarithmic" if x_axis.is_logarithmic else ""
    middle = (area.top + area.bottom) / 2
    parts = [
        *_grid(area, x_axis, y_axis),
        text((area.left + area.right) / 2, area.bottom + 36, panel.x_title + logarithmic, anchor="middle"),
        text(area.left - 64, middle, panel.y_title, anchor="middle",
             more=f'transform="rotate(-90 {area.left - 64:.1f} {middle:.1f})"'),
    ]  # fmt: skip
    if not points:
        parts.append(text((area.left + area.right) / 2, middle, "nothing was measured", kind="pale", anchor="middle"))
    lines = [[place(point) for point in curve.points] for curve in panel.curves]
    for curve, line in zip(panel.curves, lines, strict=True):
        parts.append(series(curve.number, [_line(line, curve.is_dashed), *(_dot(each, curve) for each in line)]))
    labelled = [(curve.number, point) for curve in panel.curves for point in _ends_first(curve.points) if point.label]
    label_area = Box(area.left, area.top - _HEADROOM, area.right, area.bottom)
    boxes = place_labels([(place(point), point.label) for _, point in labelled], lines, label_area)
    for (number, point), box in zip(labelled, boxes, strict=True):
        if box is None:
            continue
        words = text((box.left + box.right) / 2, box.bottom - 3, point.label, kind="own", anchor="middle")
        parts.append(series(number, [words]))
    return parts


def _ends_first(points: Sequence[Point]) -> list[Point]:
    """In the order of importance: labels between the ends of a curve can be left out."""
    return [*points[-1:], *points[:1], *points[1:-1]] if len(points) > 1 else [*points]


def _grid(area: Box, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    for tick, label in zip(x_axis.ticks, x_axis.labels(), strict=True):
        x = area.left + x_axis.share(tick) * (area.right - area.left)
        yield grid_line(x, area.top, x, area.bottom)
        yield text(x, area.bottom + 16, label, kind="pale", anchor="middle")
    for tick, label in zip(y_axis.ticks, y_axis.labels(), strict=True):
        y = area.bottom - y_axis.share(tick) * (area.bottom - area.top)
        yield grid_line(area.left, y, area.right, y)
        yield text(area.left - 7, y + 4, label, kind="pale", anchor="end")


def _line(places: Sequence[Place], is_dashed: bool) -> str:
    dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="2"{dashes}/>'


def _dot(place: Place, curve: Curve) -> str:
    fill = 'class="ground" stroke="currentColor" stroke-width="2"' if curve.is_dashed else 'fill="currentColor"'
    return f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="4" {fill}/>'
