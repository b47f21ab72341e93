"""deploy/envoy/envoy.yaml with two servers of the demo model: one drains, the other is killed, under load."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

CONFIG = Path(__file__).parents[3] / "deploy" / "envoy" / "envoy.yaml"
CLIENTS = 6
PROMPT = {"inputs": "What is two plus two?", "parameters": {"max_new_tokens": 12}}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.1)


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


class Server:
    """A launcher with the demo model, run by the interpreter that has Tercet."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self._log = log
        self.start()

    def start(self) -> None:
        command = [
            os.environ["TERCET_PYTHON"], "-m", "launcher", "--model-id", "demo", "--hostname", "127.0.0.1",
            "--port", str(self.port), "--max-concurrent-requests", "16",
        ]  # fmt: skip
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        wait_until(lambda: is_healthy(self.port), f"server on port {self.port}")

    def kill(self) -> None:
        """Everything of it at once, as a lost machine."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in family:
            process.kill()
        self.process.wait(30)


class Load:
    """Clients that ask one request after the other, every other one as a stream."""

    def __init__(self, url: str) -> None:
        self.seen: Counter[str] = Counter()
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int) -> None:
        """Until so many more answers have come."""
        wanted = self.seen["good"] + count
        wait_until(lambda: self.seen["good"] >= wanted, f"{count} answers; seen: {dict(self.seen)}")

    def _ask(self, number: int) -> None:
        turn = number
        while not self._over.is_set():
            turn += 1
            with httpx.Client(base_url=self._url, timeout=60) as client:
                try:
                    self.seen[self._streamed(client) if turn % 2 else self._whole(client)] += 1
                except httpx.TransportError:
                    self.seen["cut"] += 1

    def _whole(self, client: httpx.Client) -> str:
        answer = client.post("/generate", json=PROMPT)
        return "good" if answer.status_code == 200 and answer.json()["generated_text"] else str(answer.status_code)

    def _streamed(self, client: httpx.Client) -> str:
        with client.stream("POST", "/generate_stream", json=PROMPT) as answer:
            if answer.status_code != 200:
                return str(answer.status_code)
            lines = [line for line in answer.iter_lines() if line.startswith("data:")]
        return "good" if lines and '"generated_text":null' not in lines[-1] and "error" not in lines[-1] else "cut"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    started = [Server(free_port(), tmp_path / f"server-{name}.log") for name in "ab"]
    yield started
    for server in started:
        if server.process.poll() is None:
            server.process.terminate()
            server.process.wait(60)


@pytest.fixture
def address(servers: list[Server], tmp_path: Path) -> Iterator[str]:
    """Of Envoy, with the example's addresses exchanged."""
    port = free_port()
    text = CONFIG.read_text().replace("port_value: 10000", f"port_value: {port}").replace("0.0.0.0", "127.0.0.1")
    for name, server in zip("ab", servers, strict=True):
        old = f"{{address: server-{name}.example, port_value: 8080}}"
        assert old in text
        text = text.replace(old, f"{{address: 127.0.0.1, port_value: {server.port}}}")
    config = tmp_path / "envoy.yaml"
    config.write_text(text)
    envoy = Path(sys.executable).parent / "envoy"
    with (tmp_path / "envoy.log").open("wb") as log:
        process = subprocess.Popen(
            [str(envoy), "-c", str(config), "--concurrency", "1", "--base-id", str(port % 30000)],
            stdout=log, stderr=log,
        )  # fmt: skip
    wait_until(lambda: is_healthy(port), "Envoy")
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)


def test_a_server_may_drain_and_one_may_be_lost(servers: list[Server], address: str) -> None:
    first, second = servers
    with Load(address) as load:
        load.more(20)
        first.process.terminate()
        wait_until(lambda: first.process.poll() is not None, "the end of the server that drains")
        load.more(20)
        assert set(load.seen) == {"good"}, load.seen
        first.start()
        time.sleep(2)  # two health checks
        load.more(20)
        second.kill()
        load.more(20)
        time.sleep(2)
        lost = sum(load.seen.values()) - load.seen["good"]
        load.more(20)
        after = sum(load.seen.values()) - load.seen["good"]
    assert lost <= CLIENTS, f"more than those in flight: {load.seen}"
    assert after == lost, load.seen
