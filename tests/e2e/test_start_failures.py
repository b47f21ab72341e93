"""Starts that are interrupted, hang, fail, or find too little memory: one cause, named last, and nobody left."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.launched import AT_IMPORT, Family, ended, sabotaged, wait_for
from support.running_server import RunningServer, running_server

pytestmark = pytest.mark.e2e

INTERRUPTED_S = 11.0 + 60.0
"""10 s for a child that does not listen, 1 s, and slack for a machine that is busy."""

# A shard whose device has memory for steps of up to 600 tokens.
_SHORT_OF_MEMORY = """
import os
if os.environ.get("RANK"):
    import torch
    from model_server.engine.engine import Engine
    real = Engine.submit_prefill
    def submit_prefill(self, *arguments, **options):
        if self.session.max_prefill_tokens > 600:
            raise {error}
        return real(self, *arguments, **options)
    Engine.submit_prefill = submit_prefill
"""


def everybody(server: RunningServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


def last_line(server: RunningServer) -> str:
    return server.log().rstrip().splitlines()[-1]


def test_interrupted_while_a_shard_loads() -> None:
    with running_server("demo", wait=False) as server:
        wait_for(server, "importing torch")
        family = everybody(server)
        server.process.send_signal(signal.SIGINT)
        assert ended(server, INTERRUPTED_S) == 0, server.log()
        assert all_gone(family)
        assert "Starting Webserver" not in server.log()


@contextlib.contextmanager
def silent_hub() -> Iterator[tuple[str, threading.Event]]:
    """A hub that takes connections and never answers; the event is set by the first one."""
    asked = threading.Event()
    kept: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                kept.append(listener.accept()[0])
                asked.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for connection in kept:
                connection.close()


def test_interrupted_while_it_downloads(tmp_path: Path) -> None:
    with silent_hub() as (url, asked):
        environ = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        with running_server("nobody/nothing", environ=environ, wait=False) as server:
            assert asked.wait(120), server.log()
            family = everybody(server)
            server.process.send_signal(signal.SIGINT)
            assert ended(server, INTERRUPTED_S) == 0, server.log()
            assert all_gone(family)
            assert "Starting shard" not in server.log()


def test_a_shard_that_fails_at_import_is_told_once_and_completely(tmp_path: Path) -> None:
    action = "raise ImportError('libdevice.so.9: cannot open')"
    environ = sabotaged(tmp_path, AT_IMPORT.format(action=action, condition='== "0"'))
    with running_server("demo", environ=environ, wait=False) as server:
        assert ended(server, 120) == 1
        log = server.log()
        assert log.count("Traceback (most recent call last)") == 1
        assert "in find_spec" in log and "from model_server.shard import run_shard" in log
        assert last_line(server).startswith(
            'Error: ShardCannotStart("shard 0 exited with status 1: The shard failed: Imp'
        )
        assert "libdevice.so.9: cannot open" in last_line(server)


@pytest.mark.long
def test_a_shard_that_hangs_is_named_with_its_phase_and_its_stacks(tmp_path: Path) -> None:
    environ = sabotaged(tmp_path, AT_IMPORT.format(action="time.sleep(600)", condition='== "0"'))
    with running_server("demo", "--startup-timeout", "15", environ=environ, wait=False) as server:
        wait_for(server, "importing torch")
        family = everybody(server)
        assert ended(server, 60) == 1
        assert all_gone(family)
        assert "Stacks of shard 0 (importing for " in server.log() and "in find_spec" in server.log()
        last = last_line(server)
        assert last.startswith('Error: ShardCannotStart("shard 0 was not ready 15 s after the start'), last
        assert "phase: importing for " in last


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_memory_that_is_short_at_the_warm_up_is_asked_for_less(tmp_path: Path, size: int) -> None:
    environ = sabotaged(tmp_path, _SHORT_OF_MEMORY.format(error="torch.OutOfMemoryError('no room')"))
    with running_server("demo", "--num-shard", str(size), environ=environ) as server:
        log = server.log()
        assert "A warm-up with 1024 prompt tokens ran out of memory" in log
        assert "trying again with a prefill budget of 512 tokens" in log
        assert "max_batch_prefill_tokens=512" in log
        assert log.count("Memory in MiB\n") == size + 1, "of each rank where it was short; in the end of one"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = json.dumps({"inputs": "Once", "parameters": {"max_new_tokens": 3}})
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()
        family = Family(server)
        assert server.stop() == 0
        assert family.left() == []


@pytest.mark.long
def test_a_prefill_budget_of_the_users_is_never_lowered(tmp_path: Path) -> None:
    environ = sabotaged(tmp_path, _SHORT_OF_MEMORY.format(error="MemoryError('no room')"))
    with running_server("demo", "--max-batch-prefill-tokens", "1024", environ=environ, wait=False) as server:
        assert ended(server, 120) == 1
        assert "trying again" not in server.log()
        last = last_line(server)
        assert last.startswith("Error: WebserverFailed(") and "Not enough memory to handle 1024 prefill tokens" in last
        assert "`--max-batch-prefill-tokens`" in last
