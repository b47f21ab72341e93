"""What must hold of a running server after whatever was done to it: nothing is held, nothing has grown, it answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from hostile.punctual import PunctualThreadTransport
from support.metrics_text import metrics_of
from support.running_server import RunningServer

SETTLED_S = 60.0
_PROMPTS = ("Once upon a time", "The quick brown fox", "zzz 123 ?!")
_IDLE = ("tgi_batch_current_size", "tgi_queue_size", "tgi_kv_blocks_live")
# gRPC and the thread pools start some threads late; a leak is one per request.
_SPARE_THREADS, _SPARE_DESCRIPTORS = 24, 8
_MOST_WORKERS = 4
"""Two that render templates and two that check grammars; forks of these end with their job. Those that prepare images
come on top."""


@dataclass(frozen=True)
class Footprint:
    """Descriptors and threads of one process."""

    descriptors: int
    threads: int


class Invariants:
    """Taken of a healthy server; `check` compares."""

    def __init__(self, server: RunningServer, headers: Mapping[str, str] | None = None) -> None:
        self._server = server
        self._headers = headers
        self._client = self._new_client()
        self._launcher = psutil.Process(server.process.pid)
        family = self._launcher.children(recursive=True)
        self.router = next(p for p in family if "router" in p.cmdline())
        self.shards = [p for p in family if "model_server" in p.cmdline()]
        prefix = _value_after("--uds-path", self.shards[0].cmdline())
        self.socket = Path(f"{prefix}-0")
        self._ids = [self._ids_of(prompt) for prompt in _PROMPTS]
        self._num_permits: int = self._client.get("/info").json()["max_concurrent_requests"]
        self._wake_workers()
        self._check_permits()  # makes the threads and connections that many at a time need
        self._client.get("/health")
        _until(lambda: not self._held(), lambda: f"still held: {self._held()}")
        self._blocks = self._metrics()["tgi_kv_blocks_free"]
        self._files = self._names()
        self._most_workers = _MOST_WORKERS + sum("wire.images.worker" in p.cmdline() for p in family)
        self._num_others = self._num_processes() - len(worker_processes(self._launcher))
        self._before = {process: _footprint(process) for process in (self.router, *self.shards)}

    def check(self) -> None:
        """Raises AssertionError; waits a while for what ends in due course."""
        _until(lambda: not self._held(), lambda: f"still held: {self._held()}")
        assert self._metrics()["tgi_kv_blocks_free"] == self._blocks, "KV blocks are lost"
        assert self._client.get("/health").status_code == 200
        assert [self._ids_of(prompt) for prompt in _PROMPTS] == self._ids
        self._check_permits()
        _until(lambda: not self._grown(), lambda: f"grown: {self._grown()}")
        assert self._names() == self._files, "files are left behind"
        _until(
            lambda: self._num_processes() <= self._num_others + self._most_workers, lambda: "processes are left behind"
        )

    def memory(self) -> int:
        """Bytes that the router occupies."""
        return _resident(self.router)

    def memory_of_all(self) -> dict[str, int]:
        """Bytes that each process occupies."""
        sizes = {"launcher": _resident(self._launcher), "router": self.memory()}
        return sizes | {f"shard {rank}": _resident(process) for rank, process in enumerate(self.shards)}

    def _metrics(self) -> dict[str, float]:
        return metrics_of(self._client.get("/metrics").text)

    def _held(self) -> dict[str, float]:
        values = self._metrics()
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

    def _num_processes(self) -> int:
        """Dead workers included, until they are replaced."""
        return len(self._launcher.children(recursive=True))

    def _names(self) -> set[str]:
        return {path.name for path in self.socket.parent.iterdir()}

    def _ids_of(self, prompt: str) -> list[Any]:
        answer = self._generate(prompt, {"max_new_tokens": 8, "details": True, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        return [token["id"] for token in answer.json()["details"]["tokens"]]

    def _generate(self, prompt: str, parameters: Mapping[str, Any]) -> httpx.Response:
        return self._client.post("/generate", json={"inputs": prompt, "parameters": parameters})

    def _new_client(self) -> httpx.Client:
        once = httpx.Limits(max_keepalive_connections=0)  # no connection of ours stays in between
        transport = PunctualThreadTransport(limits=once, verify=False)
        return httpx.Client(base_url=self._server.url, timeout=120, headers=self._headers, transport=transport)

    def _status_alone(self) -> int:
        """With a client of its own: threads that share one may read from a connection that another one closes."""
        with self._new_client() as client:
            body = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
            return client.post("/generate", json=body).status_code

    def _wake_workers(self) -> None:
        """The processes for templates and grammars start with the first job."""
        grammar = {"type": "regex", "value": "[ab]{3}"}
        assert self._generate("x", {"max_new_tokens": 4, "grammar": grammar}).status_code == 200
        self._client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})

    def _check_permits(self) -> None:
        """As many requests at a time as there may be are all served."""
        with ThreadPoolExecutor(self._num_permits) as pool:
            statuses = list(pool.map(lambda _: self._status_alone(), range(self._num_permits)))
        assert set(statuses) == {200}, f"permits are lost: {statuses}"


def worker_processes(launcher: psutil.Process) -> list[psutil.Process]:
    """Those that render templates and check grammars, as far as they live."""
    found = []
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too
            if any(word.endswith(".worker") for word in process.cmdline()):
                found.append(process)
    return found


def _value_after(option: str, command: list[str]) -> str:
    return command[command.index(option) + 1]


def _resident(process: psutil.Process) -> int:
    size: int = process.memory_info().rss
    return size


def _footprint(process: psutil.Process) -> Footprint:
    return Footprint(process.num_fds(), process.num_threads())


def _until(condition: Callable[[], bool], say: Callable[[], str]) -> None:
    deadline = time.monotonic() + SETTLED_S
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.1)
