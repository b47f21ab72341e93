"""`make check-deploy`: its tools live in an environment of their own, as some are large."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).parents[2]
