"""Tiny checkpoints with the logits that transformers computes for them, each made once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from parity.cases import Cases


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing by threads, and on a busy machine each of their meetings costs milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("checkpoints"))
