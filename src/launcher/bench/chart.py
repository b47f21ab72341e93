"""Grouped bar charts as SVG: no library in the base install draws one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#3366aa", "#dd8833", "#44aa77", "#aa4466", "#777777", "#9977cc")
_ROW, _GAP, _LEFT, _BARS, _RIGHT, _TOP = 18, 14, 190, 420, 90, 30


@dataclass(frozen=True)
class Chart:
    """One panel. values: series name -> a number for each group; None draws nothing."""

    title: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float | None]]


def svg(charts: Sequence[Chart]) -> str:
    """The panels below each other, bars to the right, each with its number."""
    parts: list[str] = []
    top = 10
    for chart in charts:
        panel, height = _panel(chart, top)
        parts += panel
        top += height
    width = _LEFT + _BARS + _RIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(chart: Chart, top: int) -> tuple[list[str], int]:
    numbers = [v for values in chart.values.values() for v in values if v is not None]
    longest = max(numbers, default=0.0) or 1.0
    parts = [f'<text x="10" y="{top + 16}" font-weight="bold">{escape(chart.title)}</text>']
    y = top + _TOP
    for place, group in enumerate(chart.groups):
        parts.append(f'<text x="10" y="{y + 13}">{escape(group)}</text>')
        for colour, (name, values) in zip(_cycle(len(chart.values)), chart.values.items(), strict=True):
            value = values[place]
            if value is not None:
                length = _BARS * value / longest
                parts.append(
                    f'<rect x="{_LEFT}" y="{y + 2}" width="{length:.1f}" height="{_ROW - 4}" fill="{colour}"/>'
                    f'<text x="{_LEFT + length + 5:.1f}" y="{y + 13}">{value:,.4g}'
                    f"{' ' + escape(name) if len(chart.values) > 1 else ''}</text>"
                )
            y += _ROW
        y += _GAP
    return parts, y - top


def _cycle(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]
