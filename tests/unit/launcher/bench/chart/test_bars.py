from __future__ import annotations

from xml.etree import ElementTree

from launcher.bench.chart.bars import BarPanel, bar_chart


def test_bars_are_as_long_as_their_numbers() -> None:
    drawn = ElementTree.fromstring(bar_chart([BarPanel("t", ["a", "b"], {"x": [2.0, 1.0], "y": [None, 0.0]})]))
    bars = list(drawn.iter("{http://www.w3.org/2000/svg}rect"))[1:]  # the first is the ground
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == [420.0, 210.0, 0.0]
