"""Where a chunk of a prompt may end: for the router's first chunk and the shard's later ones."""

from __future__ import annotations

from collections.abc import Iterable


def chunk_end(start: int, end: int, whole: Iterable[tuple[int, int]]) -> int:
    """The end of the chunk of a prompt that begins at token `start` and may reach token `end`.

    whole: places `(start, stop)`, in order, within which no chunk may end. The chunk ends before one that does not fit,
    unless it would then be empty: a place that is first in its step is computed whole, whatever the budget.
    """
    for first, stop in whole:
        if first >= end:
            break
        if stop <= end:
            continue
        return first if first > start else stop
    return end


def encoder_end(
    start: int, end: int, images: Iterable[tuple[int, int, int]], rows: int, *, takes_any: bool
) -> tuple[int, int]:
    """Where the chunk from token `start` to at most `end` ends whose images to encode have at most `rows` rows, and how
    many they have.

    images: of those that are not encoded, in order: first token, behind the last, rows. takes_any: the first image may
    have more rows; one at `start` always may, so that the chunk has a token.
    """
    taken = 0
    for first, stop, count in images:
        if first >= end:
            break
        if stop <= start:
            continue
        if taken + count > rows and first > start and not (takes_any and not taken):
            return first, taken
        taken += count
    return end, taken
