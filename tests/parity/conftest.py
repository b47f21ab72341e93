"""Tiny checkpoints with the logits that transformers computes for them, each made once per session."""

from __future__ import annotations

import pytest
from parity.cases import Cases


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("checkpoints"))
