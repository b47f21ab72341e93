"""How much a run tries: some random cases, or more with `pytest --thorough`; long tests up to LONG_TESTS_END."""

from __future__ import annotations

import os
from collections.abc import Collection

# A Unix time; a run that may only last so long leaves out what is then left.
LONG_TESTS_END = float(os.environ.get("LONG_TESTS_END") or "inf")

thorough = False
"""Set by tests/conftest.py before any test is imported."""


def examples(quick: int, thoroughly: int) -> int:
    """The number of cases of this run."""
    return thoroughly if thorough else quick


def is_left_out(marks: Collection[str], now: float, end: float = LONG_TESTS_END) -> bool:
    """Whether a test with such marks must not begin any more."""
    return now > end and not {"long", "parity"}.isdisjoint(marks)
