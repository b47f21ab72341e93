"""Where chunks end."""

from __future__ import annotations

import pytest

from wire.images.borders import chunk_end, encoder_end

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


IMAGES = [(4, 8, 4), (8, 12, 4), (20, 30, 10)]


@pytest.mark.parametrize(
    ("start", "end", "rows", "takes_any", "expected"),
    [
        (0, 40, 18, False, (40, 18)),
        (0, 40, 17, False, (20, 8)),
        (0, 40, 7, False, (8, 4)),
        (0, 40, 3, False, (4, 0)),
        (0, 40, 3, True, (8, 4)),  # the first of a step, whatever its rows
        (4, 40, 3, False, (8, 4)),  # one that opens the chunk
        (0, 5, 4, False, (5, 4)),  # all rows of an image of which one token is computed
        (0, 5, 3, False, (4, 0)),
        (6, 40, 8, False, (20, 8)),  # the first is partly in the cache
        (8, 40, 14, False, (40, 14)),
        (30, 40, 0, False, (40, 0)),
        (0, 4, 0, False, (4, 0)),
    ],
)
def test_a_chunk_ends_before_an_image_that_is_too_much_to_encode(
    start: int, end: int, rows: int, takes_any: bool, expected: tuple[int, int]
) -> None:
    assert encoder_end(start, end, IMAGES, rows, takes_any=takes_any) == expected
