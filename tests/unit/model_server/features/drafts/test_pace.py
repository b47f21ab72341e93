"""How many drafted tokens are worth their time."""

from __future__ import annotations

import pytest

from model_server.features.drafts.pace import Acceptance, Pace


def pace(ratio: float, rows: int, longer: int) -> Pace:
    """Steps of `longer` rows take `ratio` times as long as those of `rows`."""
    return Pace([(rows, 1.0), (longer, ratio)])


@pytest.mark.parametrize(
    ("costs", "rows", "share", "most", "expected"),
    [
        (pace(1.2, 1, 6), 1, 0.8, 5, 5),
        (pace(5.0, 8, 48), 8, 0.5, 5, 0),
        (pace(1.4, 8, 16), 8, 0.5, 1, 0),
        (pace(1.3, 8, 16), 8, 0.5, 1, 1),
        (pace(1.0, 1, 16), 1, 0.0, 5, 0),
        (Pace([(1, 1.0)]), 1, 0.9, 3, 3),
    ],
)
def test_the_length_that_gains_most(costs: Pace, rows: int, share: float, most: int, expected: int) -> None:
    assert costs.best_length([most] * rows, [0] * rows, [share] * rows, most) == expected


def test_rows_draft_what_they_have() -> None:
    costs = Pace([(1, 1.0), (2, 1.1), (4, 1.3), (8, 1.7)])
    assert costs.best_length([0, 4, 0], [0] * 3, [0.5, 1.0, 0.5], 8) == 4
    assert costs.best_length([0, 0], [0, 0], [1.0, 1.0], 8) == 0


@pytest.mark.parametrize(("sure", "share", "expected"), [(0, 0.05, 0), (2, 0.05, 2), (2, 0.9, 5), (5, 0.05, 5)])
def test_what_is_sure_says_nothing_of_what_follows(sure: int, share: float, expected: int) -> None:
    assert Pace([(1, 1.0), (6, 2.0)]).best_length([5], [sure], [share], 5) == expected


def test_gains_have_the_same_bits_on_every_cpu() -> None:
    """They are sums of products, which are rounded alike everywhere. Powers are not."""
    for share in (0.1, 0.37, 0.7, 0.9, 0.99):
        chance, brought = 1.0, 1.0
        for length in range(1, 16):
            chance *= share
            brought += chance
            assert Pace([(1, 1.0)]).gain(length, [length], [share]) == brought


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = Pace([(1, 1.0), (2, 0.9), (4, 2.0)])
    assert [costs.cost(rows) for rows in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 3.0])


def test_the_newest_outcomes_weigh_most() -> None:
    acceptance = Acceptance()
    acceptance.note(accepted=2, refused=True)
    assert acceptance.share == pytest.approx(((0.5 * 0.9 + 0.1) * 0.9 + 0.1) * 0.9)
    for _ in range(60):
        acceptance.note(accepted=1, refused=False)
    assert acceptance.share > 0.99
