"""Worker processes: large frames, answers that stay away, deaths, and their end with the router's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wire.worker.frames import with_limit
from wire.worker.process import WorkerEndedError, WorkerProcess

_MODULE = """
import os, time
from wire.worker.main import serve

def answer(asked, limit_s):
    if asked == b"sleep":
        time.sleep(60)
    if asked.startswith(b"die"):
        with open(asked[4:], "ab", buffering=0) as deaths:
            deaths.write(b"x")
            if deaths.tell() <= int(asked[3:4]):
                os._exit(3)
    if asked == b"environ":
        return " ".join(os.environ).encode()
    if asked == b"memory":
        try:
            return str(len(bytes(1 << 30))).encode()
        except MemoryError:
            return b"no memory"
    return asked[::-1]

serve(answer, memory_limit=256 << 20, cpu_limit_s=5)
"""


class Worker(WorkerProcess):
    def exchange(self, data: bytes, timeout_s: float) -> bytes:
        return super().exchange(with_limit(timeout_s, data), timeout_s)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    (tmp_path / "worker_of_a_test.py").write_text(_MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    process = Worker("worker_of_a_test")
    yield process
    process.end()


def test_frames_of_any_size(worker: WorkerProcess) -> None:
    for data in (b"", b"abc", bytes(range(256)) * 40_000):
        assert worker.exchange(data, 30) == data[::-1]


def test_an_answer_that_stays_away_ends_the_process(worker: WorkerProcess) -> None:
    assert worker.exchange(b"ab", 30) == b"ba"
    before = worker.pid
    with pytest.raises(TimeoutError):
        worker.exchange(b"sleep", 0.2)
    assert worker.pid is None
    assert worker.exchange(b"ab", 30) == b"ba" and worker.pid != before


def test_a_frame_that_nobody_reads_ends_the_process(worker: WorkerProcess) -> None:
    worker.start()
    with pytest.raises(TimeoutError):
        worker.exchange(b"sleep", 0.2)
    process = worker.start()
    process.send_signal(19)  # SIGSTOP
    with pytest.raises(TimeoutError):
        worker.exchange(b"x" * (8 << 20), 0.2)
    assert worker.pid is None


def test_a_process_that_was_killed_is_replaced_and_asked_again(worker: WorkerProcess, tmp_path: Path) -> None:
    before = worker.start()
    before.kill()
    before.wait()
    assert worker.exchange(b"ab", 30) == b"ba"
    once = f"die1{tmp_path}/once".encode()
    assert worker.exchange(once, 30) == once[::-1]  # killed while it had the frame


def test_a_frame_that_ends_two_processes_is_given_up(worker: WorkerProcess, tmp_path: Path) -> None:
    with pytest.raises(WorkerEndedError, match="status 3"):
        worker.exchange(f"die9{tmp_path}/deaths".encode(), 30)
    assert (tmp_path / "deaths").read_bytes() == b"xx"
    assert worker.pid is None
    assert worker.exchange(b"memory", 30) == b"no memory"


def test_it_ends_when_the_router_is_gone(worker: WorkerProcess) -> None:
    process: subprocess.Popen[bytes] = worker.start()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0


def test_after_kill_there_is_no_other(worker: WorkerProcess) -> None:
    worker.start()
    worker.kill()
    with pytest.raises(OSError):
        worker.exchange(b"ab", 30)
    with pytest.raises(ConnectionAbortedError):
        worker.exchange(b"ab", 30)


def test_a_module_that_does_not_start() -> None:
    with pytest.raises(ConnectionError):
        WorkerProcess("router.no_such_module").start()
    with pytest.raises(ConnectionResetError):  # which says that no frame is to blame
        WorkerProcess("router.no_such_module").exchange(b"", 30)


def test_it_has_no_secret_of_the_environment(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"API_KEY", "HF_TOKEN", "GROUP_TOKEN", "NGROK_AUTHTOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"}
    for name in secrets:
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    names = set(worker.exchange(b"environ", 30.0).decode().split())
    assert {"TOKENIZERS_PARALLELISM", "PATH"} <= names and not secrets & names
