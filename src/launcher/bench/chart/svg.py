"""What every chart is made of: a document readable in light and dark, text, lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]

# Each series in light and in dark; adjacent ones also differ in brightness.
_SERIES = (
    ("#2b62b3", "#7db0ff"), ("#c4651a", "#ffb066"), ("#1f8a5b", "#5fd3a0"),
    ("#a83267", "#ff8fbc"), ("#666666", "#b5b5b5"), ("#7a55b8", "#c7a6ff"),
)  # fmt: skip
_LIGHT = {".ground": "fill:#ffffff", ".ink": "fill:#1f2328", ".pale": "fill:#59636e", ".grid": "stroke:#dfe3e8"}
_DARK = {".ground": "fill:#16191d", ".ink": "fill:#e6e9ed", ".pale": "fill:#a3acb7", ".grid": "stroke:#353b43"}

# Of a sans-serif letter, on average and rather too wide, as a part of the font size.
_LETTER = 0.58


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """A whole SVG file. Where a program does not know `prefers-color-scheme`, the light colours are used."""
    own = ".own{fill:currentColor}"
    light = _rules(_LIGHT, [pair[0] for pair in _SERIES])
    dark = _rules(_DARK, [pair[1] for pair in _SERIES])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, sans-serif" font-size="12">\n'
        f"<style>{own} {light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>\n"
        '<rect class="ground" width="100%" height="100%"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _rules(classes: dict[str, str], series: Sequence[str]) -> str:
    rules = [*classes.items(), *((f".s{number}", f"color:{colour}") for number, colour in enumerate(series))]
    return " ".join(f"{name}{{{rule}}}" for name, rule in rules)


def series(number: int, parts: Iterable[str]) -> str:
    """Parts drawn in `currentColor`, in the colour of series `number`; the colours repeat."""
    return f'<g class="s{number % len(_SERIES)}">' + "".join(parts) + "</g>"


def text(x: float, y: float, words: str, *, kind: str = "ink", anchor: Anchor = "start", more: str = "") -> str:
    """Write one line of text.

    Args:
        y: Of the line below the letters.
        kind: ink, pale, or own, the colour of a series.
    """
    attributes = "" if anchor == "start" else f' text-anchor="{anchor}"'
    attributes += f" {more}" if more else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>'


def text_width(words: str, size: float = 12) -> float:
    """About as many pixels as the words take."""
    return len(words) * size * _LETTER


def grid_line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
