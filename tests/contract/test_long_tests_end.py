"""A run that may only last so long leaves out long tests, and no others."""

from __future__ import annotations

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
