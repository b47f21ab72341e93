"""Jobs in a fork of a worker process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# The worker dies after the fork, before the fork has asked to die with it.
_WORKER = """
import os, signal, sys, time
from pathlib import Path
from wire.worker import forked

worker = os.getpid()

def late(*asked):
    os.kill(worker, signal.SIGKILL)
    while os.getppid() == worker:
        time.sleep(0.001)

def work():
    Path(sys.argv[1]).touch()
    return b"done"

forked._PRCTL = late
forked.Forked().run(work, 60.0)
"""


def test_a_worker_that_dies_at_once_leaves_no_job_behind(tmp_path: Path) -> None:
    started = tmp_path / "started"
    ended = subprocess.run([sys.executable, "-c", _WORKER, started], stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode < 0
    assert ended.stdout == b""  # its end: the fork, which had the same output, has left
    assert not started.exists()
