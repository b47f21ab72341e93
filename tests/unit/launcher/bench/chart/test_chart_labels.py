from __future__ import annotations

import itertools

import pytest

from launcher.bench.chart.labels import Box, Place, place_labels

AREA = Box(0, 0, 400, 300)


@pytest.mark.parametrize(
    "places",
    [
        [(30.0, 250.0), (120.0, 100.0), (200.0, 40.0), (300.0, 35.0)],
        [(200.0, 100.0), (204.0, 99.0), (206.0, 98.0)],  # almost the same point
        [(3.0, 297.0), (397.0, 3.0), (3.0, 3.0), (397.0, 297.0)],  # corners
    ],
)
def test_labels_cover_no_other_and_stay_inside(places: list[Place]) -> None:
    words = ["1 client", "8 clients", "32 clients", "128 clients"]
    boxes = [*filter(None, place_labels(list(zip(places, words, strict=False)), [places], AREA))]
    assert len(boxes) == len(places)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.is_in(AREA) for box in boxes)


def test_a_label_covers_no_curve_where_there_is_another_place() -> None:
    line = [(50.0, 250.0), (200.0, 100.0), (350.0, 90.0)]
    for box in place_labels([(place, "16 clients") for place in line], [line], AREA):
        assert box is not None
        assert not any(box.overlaps(Box(x - 1, y - 1, x + 1, y + 1)) for x, y in line)


def test_a_label_that_fits_nowhere_is_written_all_the_same() -> None:
    [box] = place_labels([((5.0, 5.0), "a label that is longer than the area is wide")], [], Box(0, 0, 60, 20))
    assert box is not None and box.right - box.left > 60


def test_of_labels_without_a_place_the_later_ones_are_left_out() -> None:
    places = [(200.0 + number / 10, 150.0) for number in range(20)]
    boxes = place_labels([(place, "16 clients") for place in places], [places], AREA)
    kept = [box for box in boxes if box is not None]
    assert boxes[0] is not None and 0 < len(kept) < len(boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(kept, 2))
