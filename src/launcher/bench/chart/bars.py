"""Grouped bars, to the right, each with its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.bench.chart.svg import document, series, text, text_width

_ROW, _GAP, _LEFT, _BARS, _TOP = 18, 14, 190, 420, 30
_MARGIN = 10


@dataclass(frozen=True)
class BarPanel:
    """values: series name -> a number for each group; None draws nothing."""

    title: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]


def bar_chart(panels: Sequence[BarPanel]) -> str:
    """The panels below each other."""
    parts: list[str] = []
    top = 10
    for panel in panels:
        drawn, height = _drawn(panel, top)
        parts += drawn
        top += height
    names = max((text_width(_label(1234.0, name)) for panel in panels for name in panel.values), default=0.0)
    return document(_LEFT + _BARS + names + _MARGIN, top, parts)


def _drawn(panel: BarPanel, top: int) -> tuple[list[str], int]:
    numbers = [v for values in panel.values.values() for v in values if v is not None]
    longest = max(numbers, default=0.0) or 1.0
    parts = [text(10, top + 16, panel.title, more='font-weight="bold"')]
    y = top + _TOP
    for place, group in enumerate(panel.groups):
        parts.append(text(10, y + 13, group))
        for number, (name, values) in enumerate(panel.values.items()):
            value = values[place]
            if value is not None:
                length = _BARS * value / longest
                bar = f'<rect x="{_LEFT}" y="{y + 2}" width="{length:.1f}" height="{_ROW - 4}" fill="currentColor"/>'
                label = text(_LEFT + length + 5, y + 13, _label(value, name if len(panel.values) > 1 else ""))
                parts += [series(number, [bar]), label]
            y += _ROW
        y += _GAP
    return parts, y - top


def _label(value: float, name: str) -> str:
    return f"{value:,.4g} {name}".rstrip()
