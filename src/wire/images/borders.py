"""Where a chunk of a prompt may end: for the router's first chunk and the shard's later ones."""

from __future__ import annotations

from collections.abc import Iterable


def chunk_end(start: int, end: int, whole: Iterable[tuple[int, int]]) -> int:
    """End the chunk from `start` by `end` at the latest, outside of `whole` spans, which may exceed it if first."""
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
    """End the chunk where unencoded images exceed `rows`; return its end and their rows.

    Args:
        images: Unencoded ones in order: first token, end, rows.
        takes_any: The first may have more rows, as one at `start` always.
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
