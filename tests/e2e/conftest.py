"""Servers that several files ask without changing them; a file with options of its own has a `server` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running_server import RunningServer, running_server
from support.tiny_models import tiny_checkpoint

CACHE = 16 * 2**20


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The demo model without options. Each process that runs tests has one."""
    with running_server("demo") as running:
        yield running


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint; no test changes it."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama_server(llama: Path) -> Iterator[RunningServer]:
    """`llama` with a KV cache of `CACHE` bytes."""
    with running_server(llama, "--dtype", "float32", "--kv-cache-memory", str(CACHE)) as running:
        yield running
