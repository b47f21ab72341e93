"""A whole server with small limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.acceptance import KEY, MAX_CONCURRENT, MAX_INPUT, MAX_TOTAL
from support.running_server import RunningServer, running_server


@pytest.fixture(scope="session")
def server(llama: Path) -> Iterator[RunningServer]:
    with running_server(
        llama, "--dtype", "float32", "--max-total-tokens", str(MAX_TOTAL), "--max-input-tokens", str(MAX_INPUT),
        "--max-batch-prefill-tokens", str(MAX_TOTAL), "--max-batch-total-tokens", str(5 * MAX_TOTAL),
        "--max-concurrent-requests", str(MAX_CONCURRENT), "--enable-prefill-logprobs", "--payload-limit", "100000",
        "--api-key", KEY, environ={"KSERVE_API": "true"},
    ) as started:  # fmt: skip
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120, headers={"authorization": f"Bearer {KEY}"}) as opened:
        yield opened
