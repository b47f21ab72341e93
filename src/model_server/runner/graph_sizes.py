"""Which batch sizes decode steps are captured for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from model_server.errors import StartupError

# TGI's default ends at 32; larger batches gain as much in sum, and a graph costs little beyond the first.
DEFAULT_SIZES = (1, 2, 4, *range(8, 257, 8))
# Beyond, a step takes longer than the host needs to enqueue it.
LARGEST_SIZE = 2048

# Drafted tokens that windows have beside none and the most.
WINDOW_LENGTHS = (3, 1)


def graph_sizes(asked: Iterable[int], max_batch_size: int | None) -> tuple[int, ...]:
    """Return batch sizes to capture, the largest first.

    Args:
        asked: `--cuda-graphs`; empty: defaults; only 0: none. Sizes beyond the next above `max_batch_size` are left
            out.
    """
    asked = tuple(asked)
    sizes = sorted({size for size in asked if size > 0} if asked else DEFAULT_SIZES)
    if sizes and sizes[-1] > LARGEST_SIZE:
        raise StartupError(f"--cuda-graphs {sizes[-1]}: the largest batch size that can be captured is {LARGEST_SIZE}")
    if max_batch_size is not None:
        needed = next((i for i, size in enumerate(sizes) if size >= max_batch_size), len(sizes))
        sizes = sizes[: needed + 1]
    return tuple(reversed(sizes))


def decode_rows(max_batch_size: int | None, most: int, max_rows: int) -> int | None:
    """Bound the tokens of a decode step with drafts, if bounded."""
    if max_batch_size is None or not most:
        return max_batch_size
    return max(max_batch_size, min(max_rows, max_batch_size * (most + 1)))


def window_lengths(most: int) -> list[int]:
    """Return drafts' possible lengths, rising up to `most`."""
    return sorted({most, *(one for one in WINDOW_LENGTHS if one < most)}) if most else []


def window_sizes(most: int, max_rows: int, max_batch_size: int | None) -> Mapping[int, tuple[int, ...]]:
    """Return batch sizes by places, the largest first, up to `max_rows` places in all."""
    found = {}
    for places in (length + 1 for length in reversed(window_lengths(most))):
        largest = max_rows // places if max_batch_size is None else min(max_rows // places, max_batch_size)
        if largest:
            found[places] = graph_sizes((), largest)
    return found
