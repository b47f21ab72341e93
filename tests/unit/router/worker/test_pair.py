"""A worker process with its queue: callers that leave while the process is being replaced."""

from __future__ import annotations

import asyncio
import subprocess
import threading

import pytest
from router_fakes import until

from router.worker.lane import Lane
from router.worker.pair import QueuedWorker
from wire.worker.process import WorkerProcess


class Replaced(WorkerProcess):
    """Has a job, and the pid of a process that was there a moment ago."""

    def __init__(self, go_on: threading.Event) -> None:
        super().__init__("no.module")
        ended = subprocess.Popen(["true"])
        ended.wait()
        self._pid, self._go_on = ended.pid, go_on

    @property
    def pid(self) -> int:
        return self._pid

    def exchange(self, data: bytes, timeout_s: float) -> bytes:
        assert self._go_on.wait(60)
        raise ConnectionResetError


async def test_a_caller_that_leaves_while_the_process_is_replaced_is_cancelled_as_any_other() -> None:
    go_on = threading.Event()
    worker = QueuedWorker("no.module", Lane("test"))
    worker.process = Replaced(go_on)
    task = asyncio.create_task(worker.ask(1, lambda: b"job", 5.0))
    try:
        await until(lambda: worker.current is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        go_on.set()
        worker.close()


async def test_a_server_that_stops_before_its_workers_have_started_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = QueuedWorker("no.module", Lane("test"))
    worker.process.kill()
    worker.warm_up()
    worker.close()
    assert not caplog.records
    worker = QueuedWorker("no.module", Lane("test"))
    worker.warm_up()
    await until(lambda: bool(caplog.records))
    assert "no.module cannot be started" in caplog.text
    worker.close()
