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
