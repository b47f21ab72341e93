"""Where chunks end."""

from __future__ import annotations

import pytest

from wire.images.borders import chunk_end

WHOLE = [(4, 8), (8, 12), (20, 30)]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 3, 3),
        (0, 4, 4),
        (0, 5, 4),  # the image opens the next step
        (0, 8, 8),
        (0, 11, 8),
        (4, 6, 8),  # whole, over the budget
        (8, 9, 12),
        (6, 7, 8),  # a cached prefix ends inside: the rest of it
        (0, 15, 15),
        (12, 25, 20),
        (20, 21, 30),
        (0, 40, 40),
    ],
)
def test_no_chunk_ends_within_a_whole_place(start: int, end: int, expected: int) -> None:
    assert chunk_end(start, end, WHOLE) == expected


def test_chunks_of_any_budget_cover_the_prompt_and_end_outside_of_places() -> None:
    for budget in range(1, 41):
        start = 0
        while start < 40:
            end = chunk_end(start, min(start + budget, 40), WHOLE)
            assert start < end <= 40
            assert not any(first < end < stop for first, stop in WHOLE)
            start = end


def test_without_places_the_budget_decides() -> None:
    assert chunk_end(3, 7, []) == 7
