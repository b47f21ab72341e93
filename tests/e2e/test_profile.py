"""Where a step's time goes, as a user sees it: the phases in /metrics, and a trace of some steps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.running_server import RunningServer, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile") / "new"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server("demo", "--profile", str(folder), "--profile-steps", str(STEPS)) as started:
        body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 60, "ignore_eos": True}}
        httpx.post(f"{started.url}/generate", json=body, timeout=60).raise_for_status()
        yield started


def test_every_phase_of_every_step_is_counted(server: RunningServer) -> None:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    counts = {
        line.split('phase="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("tgi_batch_phase_duration_count")
    }
    assert set(counts) == {"idle", "inputs", "forward", "sampling", "wait", "text", "drafting"}
    assert set(counts.values()) == {60.0}


def test_the_trace_holds_the_steps_that_were_asked_for(server: RunningServer, folder: Path) -> None:
    file = folder / "rank-0.json"
    deadline = time.monotonic() + 30
    while f"Wrote the trace {file}" not in server.log():
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)
    names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
    for phase in ("inputs", "forward", "sampling"):
        assert names.count(phase) == STEPS
