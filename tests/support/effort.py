"""How much a run tries: some random cases, or more with `pytest --thorough`; long tests up to LONG_TESTS_END."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

# A Unix time; a run that may only last so long leaves out what is then left.
LONG_TESTS_END = float(os.environ.get("LONG_TESTS_END") or "inf")

thorough = False
"""Set by tests/conftest.py before any test is imported."""


def examples(quick: int, thoroughly: int) -> int:
    """The number of cases of this run."""
    return thoroughly if thorough else quick


def is_thinned_out(places: Iterable[int], of: int) -> bool:
    """Whether a case is left to the thorough part; kept is one of `of`, with each value of each parameter.

    Args:
        places: Of its value among those of each parameter.
    """
    return sum(places) % of != 0


def is_left_out(marks: Collection[str], now: float, end: float = LONG_TESTS_END) -> bool:
    """Whether a test with such marks must not begin any more."""
    return now > end and not {"long", "parity"}.isdisjoint(marks)
