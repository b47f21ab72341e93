from __future__ import annotations

import pytest

from launcher.bench.chart.axes import linear, linear_or_logarithmic


@pytest.mark.parametrize(
    ("most", "last", "count"),
    [(0.0, 1, 6), (1.0, 1, 6), (2800, 3000, 4), (3001, 4000, 5), (99, 100, 6), (0.07, 0.08, 5), (1e-9, 1e-9, 6)],
)
def test_a_linear_axis_goes_from_zero_to_the_next_round_number(most: float, last: float, count: int) -> None:
    axis = linear([most, most / 2])
    assert (axis.ticks[0], axis.ticks[-1], len(axis.ticks)) == (0, pytest.approx(last), count)
    assert axis.share(last / 4) == pytest.approx(0.25)


def test_an_axis_of_nothing_has_ends_all_the_same() -> None:
    assert linear([]).ticks == linear_or_logarithmic([]).ticks == linear([0.0]).ticks


@pytest.mark.parametrize("values", [[5.0, 50.0], [0.0, 5000.0], [7.0]])
def test_what_fits_on_a_linear_axis_is_put_on_one(values: list[float]) -> None:
    assert not linear_or_logarithmic(values).is_logarithmic


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([12.0, 520.0], [10, 20, 50, 100, 200, 500, 1000]),
        ([10.0, 1000.0], [10, 20, 50, 100, 200, 500, 1000]),
        ([0.9, 1200.0], [0.1, 1, 10, 100, 1000, 10000]),
    ],
)
def test_a_logarithmic_axis_has_round_numbers_around_the_values(values: list[float], ticks: list[float]) -> None:
    axis = linear_or_logarithmic(values)
    assert axis.is_logarithmic
    assert list(axis.ticks) == ticks
    assert (axis.share(ticks[0]), axis.share(ticks[-1])) == (0, 1)
    assert axis.share((ticks[0] * ticks[-1]) ** 0.5) == pytest.approx(0.5)


def test_numbers_are_written_as_people_write_them() -> None:
    assert linear([2800]).labels() == ["0", "1,000", "2,000", "3,000"]
    assert linear([0.28]).labels() == ["0", "0.1", "0.2", "0.3"]
