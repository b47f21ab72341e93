"""What must hold of a running server after whatever was done to it: nothing is held, nothing has grown, it answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from support.running_server import RunningServer

SETTLED_S = 60.0
_PROMPTS = ("Once upon a time", "The quick brown fox", "zzz 123 ?!")
_IDLE = ("tgi_batch_current_size", "tgi_queue_size", "tgi_kv_blocks_live")
# gRPC and the thread pools start some threads late; a leak is one per request.
_SPARE_THREADS, _SPARE_DESCRIPTORS = 24, 8


@dataclass(frozen=True)
class Footprint:
    """Descriptors and threads of one process."""

    descriptors: int
    threads: int


class Invariants:
    """Taken of a healthy server; `check` compares."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        family = psutil.Process(server.process.pid).children(recursive=True)
        self.router = next(p for p in family if "router" in p.cmdline())
        self.shards = [p for p in family if "model_server" in p.cmdline()]
        with httpx.Client(base_url=server.url, timeout=60) as client:
            self._ids = [_ids(client, prompt) for prompt in _PROMPTS]
            client.get("/health")
        self._before = {process: _footprint(process) for process in (self.router, *self.shards)}

    def check(self) -> None:
        """Raises AssertionError; waits a while for what ends in due course."""
        with httpx.Client(base_url=self._server.url, timeout=60) as client:
            _until(lambda: not self._held(client), lambda: f"still held: {self._held(client)}")
            assert client.get("/health").status_code == 200
            assert [_ids(client, prompt) for prompt in _PROMPTS] == self._ids
        _until(lambda: not self._grown(), lambda: f"grown: {self._grown()}")

    def memory(self) -> int:
        """Bytes that the router occupies."""
        size: int = self.router.memory_info().rss
        return size

    def _held(self, client: httpx.Client) -> dict[str, float]:
        values = metrics_of(client.get("/metrics").text)
        return {name: values[name] for name in _IDLE if values[name] != 0}

    def _grown(self) -> list[tuple[Footprint, Footprint]]:
        """Before and after, of each process that has more than it had."""
        pairs = [(before, _footprint(process)) for process, before in self._before.items()]
        return [
            (before, now)
            for before, now in pairs
            if now.descriptors > before.descriptors + _SPARE_DESCRIPTORS
            or now.threads > before.threads + _SPARE_THREADS
        ]


def metrics_of(text: str) -> dict[str, float]:
    """Every series of a Prometheus text, by its name and labels."""
    pairs = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def _ids(client: httpx.Client, prompt: str) -> list[Any]:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 8, "details": True, "ignore_eos": True}}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["details"]["tokens"]]


def _footprint(process: psutil.Process) -> Footprint:
    return Footprint(process.num_fds(), process.num_threads())


def _until(condition: Callable[[], bool], say: Callable[[], str]) -> None:
    deadline = time.monotonic() + SETTLED_S
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.1)
