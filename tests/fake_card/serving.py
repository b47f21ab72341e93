"""The whole server on the stand-in card, and the same one on the CPU: launcher, router and shards as real processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from support.running_server import RunningServer, running_server

START_LIMIT_S = 800.0
ANSWER_LIMIT_S = 600.0
# The warm-up computes the largest step and captures every graph, in the interpreter.
_SMALL: dict[str, str | int] = {
    "dtype": "float32", "cuda_graphs": "1,2", "max_input_tokens": 48, "max_total_tokens": 96,
    "max_batch_prefill_tokens": 48, "max_step_prefill_tokens": 16, "max_batch_total_tokens": 512, "max_batch_size": 3,
}  # fmt: skip
CONSTANTS = {
    "model_server.runner.cuda_graphs:TOKEN_SIZES": "(16,)",
    "model_server.engine.warm_up:MOST_SAMPLED_ROWS": "4",
    # Else a request holds blocks for all its tokens from the start, and none is ever preempted.
    "router.scheduling.queue.request_queue:RESERVED_NEW_TOKENS": "8",
}
CARD_MIB = 4096
# A real GPU leaves no reports (tests/gpu/real_card).
IS_REAL = os.environ.get("FAKE_CARD_KERNELS") == "none"


def small(**changes: str | int | None) -> list[str]:
    """Options with which a step takes a second, and others; None leaves one of them out."""
    options = {name: value for name, value in {**_SMALL, **changes}.items() if value is not None}
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@contextmanager
def on_card(
    model: str | Path,
    reports: Path,
    *options: str,
    order: str = "late",
    devices: int = 1,
    mib: int = CARD_MIB,
    is_clean: bool = True,
    **environ: str,
) -> Iterator[RunningServer]:
    """A server whose shards compute on the stand-in. reports: an empty folder; is_clean: the stand-in must not have
    seen a fault in any process."""
    reports.mkdir(parents=True, exist_ok=True)
    settings = {
        "FAKE_CARD_REPORT": str(reports), "FAKE_CARD_ORDER": order, "FAKE_CARD_DEVICES": str(devices),
        "FAKE_CARD_MIB": str(mib), "OMP_NUM_THREADS": "1",
        "FAKE_CARD_SET": ";".join(f"{name}={value}" for name, value in CONSTANTS.items()),
    }  # fmt: skip
    with running_server(model, *options, environ={**settings, **environ}, wait=False) as server:
        _wait_healthy(server)
        yield server
    if is_clean and not IS_REAL:
        assert_clean(reports)


@contextmanager
def on_cpu(model: str | Path, *options: str) -> Iterator[RunningServer]:
    """The same without a card."""
    environ = {"FAKE_CARD_DEVICES": "0", "OMP_NUM_THREADS": "1"}
    with running_server(model, *options, environ=environ, wait=False) as server:
        _wait_healthy(server)
        yield server


def _wait_healthy(server: RunningServer) -> None:
    ends = time.monotonic() + START_LIMIT_S
    while not server.is_healthy():
        assert server.process.poll() is None, f"the launcher ended:\n{server.log()}"
        assert time.monotonic() < ends, f"not healthy after {START_LIMIT_S:g} s:\n{server.log()}"
        time.sleep(0.5)


def reports_in(folder: Path) -> list[dict[str, Any]]:
    """What the shards have seen."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [report for report in found if report["counters"]["launches"]]


def assert_clean(folder: Path) -> None:
    """Some shard has computed, and the stand-in has not complained in any."""
    reports = reports_in(folder)
    assert reports, "no shard has used the card"
    for report in reports:
        assert report["faults"] == {} and report["errors"] == [], report


def answer(server: RunningServer, inputs: str, **parameters: Any) -> dict[str, Any]:
    """What /generate says."""
    body = {"inputs": inputs, "parameters": {"details": True, "max_new_tokens": 8} | parameters}
    found = httpx.post(f"{server.url}/generate", json=body, timeout=ANSWER_LIMIT_S)
    assert found.status_code == 200, f"{found.text}\n{server.log()}"
    return found.json()  # type: ignore[no-any-return]


def said(body: dict[str, Any]) -> tuple[str, list[int], str]:
    """Text, ids and the reason of the end."""
    details = body["details"]
    return body["generated_text"], [token["id"] for token in details["tokens"]], details["finish_reason"]


def all_at_once(server: RunningServer, asked: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, list[int], str]]:
    """What all of these requests say, sent together."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: said(answer(server, one[0], **one[1])), asked))


def own_environment() -> dict[str, str]:
    """For a process of a test that computes by itself."""
    return dict(os.environ)
