"""The KV cache of a CPU has one size: in the estimate, in the plan of the launch, and in what is served."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import httpx
import pytest
from support.running_server import RunningServer

from launcher.estimate.command import run_estimate
from launcher.estimate.config import EstimateConfig

pytestmark = [pytest.mark.e2e, pytest.mark.long]
CACHE = 16 * 2**20


def test_the_memory_that_was_asked_for(
    llama: Path, llama_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_estimate(EstimateConfig(model_id=str(llama), kv_cache_memory=CACHE, json=True), os.environ) == 0
    estimated = json.loads(capsys.readouterr().out)["ways"][0]
    served = httpx.get(f"{llama_server.url}/info").json()["max_batch_total_tokens"]
    planned = re.search(r"max batch total tokens +│ (\d+)", llama_server.log())
    assert planned is not None
    assert int(planned[1]) == served == estimated["tokens"] == CACHE // estimated["token_bytes"] // 256 * 256


def test_the_default(server: RunningServer) -> None:
    """Of the demo model, which has 2^20 tokens in 2.5 GiB, or fewer on a machine with less than 10 GiB free."""
    served = httpx.get(f"{server.url}/info").json()["max_batch_total_tokens"]
    planned = re.search(r"max batch total tokens +│ (\d+)", server.log())
    assert planned is not None and int(planned[1]) == served
    assert 16_000 <= served <= 2**20
