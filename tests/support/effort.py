"""How many random cases a test tries: some in `make test`, more with `pytest --thorough` (`make thorough`)."""

from __future__ import annotations

thorough = False
"""Set by tests/conftest.py before any test is imported."""


def examples(quick: int, thoroughly: int) -> int:
    """The number of cases of this run."""
    return thoroughly if thorough else quick
