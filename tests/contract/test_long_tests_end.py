"""What a run leaves out: long tests after its end, and of thinned tests all but each nth case."""

from __future__ import annotations

import itertools

import pytest
from support import effort


@pytest.mark.parametrize(
    ("marks", "now", "left_out"),
    [
        ({"long"}, 11.0, True),
        ({"parity", "random"}, 11.0, True),
        ({"long"}, 9.0, False),
        ({"random"}, 11.0, False),
        (set(), 11.0, False),
    ],
)
def test_only_long_tests_are_left_out_after_the_end(marks: set[str], now: float, left_out: bool) -> None:
    assert effort.is_left_out(marks, now, end=10.0) is left_out
    assert not effort.is_left_out(marks, now, end=float("inf"))


@pytest.mark.parametrize("sizes", [(3, 3, 8), (2, 2), (5,), (3, 1, 7)])
def test_of_three_cases_one_is_kept_and_every_value(sizes: tuple[int, ...]) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    kept = [case for case in cases if not effort.is_thinned_out(case, 3)]
    assert abs(3 * len(kept) - len(cases)) < 3
    if min(sizes) > 1 and len(sizes) > 2:
        assert all({case[place] for case in kept} == set(range(size)) for place, size in enumerate(sizes))
