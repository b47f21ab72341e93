"""Counts replays of graphs, the only thing that a test may ask about a real GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch


class Counter(Enum):
    """Those that the tests of models read."""

    GRAPH_LAUNCHES = auto()


_replay = torch.cuda.CUDAGraph.replay
_replays = 0


def _counting(graph: Any) -> None:
    global _replays
    _replays += 1
    _replay(graph)


torch.cuda.CUDAGraph.replay = _counting  # type: ignore[method-assign]


@contextmanager
def counted() -> Iterator[dict[Counter, int]]:
    """What each counter grows by inside; known at the end."""
    before, grown = _replays, dict.fromkeys(Counter, 0)
    try:
        yield grown
    finally:
        grown[Counter.GRAPH_LAUNCHES] = _replays - before


def faults(grown: dict[Counter, int]) -> dict[str, int]:
    """None are seen."""
    return {}


def set_order(order: str) -> None:
    """The GPU has its own."""
