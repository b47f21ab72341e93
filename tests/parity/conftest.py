"""Made once per session: tiny checkpoints with the logits that transformers computes for them, and two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parity.cases import Cases
from parity.vision_ranks import VisionRanks


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisionRanks]:
    """Processes for vision models; they start with the first."""
    ranks = VisionRanks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()
