from __future__ import annotations

from xml.etree import ElementTree

import pytest

from launcher.bench.chart.curves import Curve, CurvePanel, Point, curve_chart
from launcher.bench.chart.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*curves: Curve, heading: str = "h", notes: tuple[str, ...] = ()) -> ElementTree.Element:
    return ElementTree.fromstring(curve_chart(heading, [CurvePanel("x, ms", "y", curves)], "labels: l", notes))


def points_of(chart: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """Of each curve, after the lines of the legend."""
    lines = [line.attrib["points"].split() for line in chart.iter(f"{SVG}polyline")]
    places = [[(float(x), float(y)) for x, y in (pair.split(",") for pair in line)] for line in lines]
    return places[len(places) // 2 :]


def test_points_are_where_the_axes_say() -> None:
    [line] = points_of(drawn(Curve("c", [Point(0, 0), Point(50, 500), Point(100, 1000)])))
    (left, bottom), (middle, half), (right, top) = line
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert half == pytest.approx((bottom + top) / 2, abs=0.1)
    assert left < right and top < bottom


def test_values_far_apart_are_put_on_a_logarithmic_axis_which_says_so() -> None:
    chart = drawn(Curve("c", [Point(10, 0), Point(100, 1), Point(1000, 2)]))
    [((left, _), (middle, _), (right, _))] = points_of(chart)
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert "x, ms, logarithmic" in list(chart.itertext())


def test_names_labels_and_long_notes_are_written_inside_the_picture() -> None:
    note = "launcher bench " + " ".join(f"--option-{number} value" for number in range(40))
    chart = drawn(
        Curve("first <run>", [Point(1, 1, "1 client")]), Curve("second", [Point(2, 2)], 1, is_dashed=True),
        heading="a model & a server", notes=(note,),
    )  # fmt: skip
    words = list(chart.itertext())
    assert {"first <run>", "second", "1 client", "labels: l", "a model & a server"} <= set(words)
    assert "--option-39 value" in " ".join(words)
    for text in chart.iter(f"{SVG}text"):
        assert float(text.attrib["y"]) < float(chart.attrib["height"])
        assert text_width(text.text or "", 11.5) < float(chart.attrib["width"])


def test_a_chart_of_no_points_is_a_chart() -> None:
    chart = drawn(Curve("c", []))
    assert points_of(chart) == [[]]
    assert "nothing was measured" in list(chart.itertext())


def test_the_ends_of_a_curve_keep_their_labels_where_it_is_crowded() -> None:
    points = [Point(1 + number / 100, 1 + number / 100, f"{number} clients") for number in range(40)]
    written = set(drawn(Curve("c", points)).itertext())
    assert {"0 clients", "39 clients"} <= written
    assert any(point.label not in written for point in points)


def test_colours_are_those_of_light_and_of_dark_pages() -> None:
    [style] = drawn(Curve("c", [])).iter(f"{SVG}style")
    light, _, dark = (style.text or "").partition("@media (prefers-color-scheme: dark)")
    for name in (".ground", ".ink", ".pale", ".grid", ".s0", ".s5"):
        assert name in light and name in dark
