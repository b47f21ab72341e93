"""S14: the tests of the kernels on the GPU, each file in a process of its own and several at a time.

A fault of the device (an illegal address) stays with the process until it ends. Failures are written as they come.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.context import Context
from benchmarks.gpu.failing_tests import DONE, LINES
from benchmarks.gpu.measuring.environment import ROOT

KERNELS = ROOT / "tests" / "kernels"
# About the interpreter, or the compiler without a GPU.
LEFT_OUT = ("test_aot.py",)
TINY_FILES = ("test_trial.py", "test_chosen_backend.py")
MOST_AT_ONCE = 14
NOTHING_COLLECTED = 5


def run(context: Context) -> None:
    """All at once, as far as there are cores; what has not ended in time is stopped."""
    names = sorted(path.name for path in KERNELS.glob("test_*.py") if path.name not in LEFT_OUT)
    waiting = list(TINY_FILES) if context.tiny else names
    at_once = max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) - 1))
    running: dict[str, subprocess.Popen[bytes]] = {}
    folder = Path(context.lines.name).parent
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running[name] = _start(context, folder, name)
        for name in [name for name, child in running.items() if child.poll() is not None]:
            _report(context, folder, name, running.pop(name).returncode)
        if not context.has_time(1):
            break
        time.sleep(0.2)
    for name, child in running.items():
        child.kill()
        child.wait()
        context.note(f"{name}: not ended in time", _counts(folder, name))
    for name in waiting:
        context.skip(name, "no time left")


def _start(context: Context, folder: Path, name: str) -> subprocess.Popen[bytes]:
    environ = os.environ | {"OMP_NUM_THREADS": "1", LINES: context.lines.name, DONE: str(_done(folder, name))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.failing_tests", "-p", "no:cacheprovider"]
    # What else is installed beside a GPU may warn of itself: here that is no failure.
    command += ["-o", "addopts=-ra", "-o", "filterwarnings=default", "-m", "not slow"]
    command += ["--device", context.device.type, str(KERNELS / name)]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=ROOT
        )


def _report(context: Context, folder: Path, name: str, status: int) -> None:
    if status == NOTHING_COLLECTED:
        context.skip(name, "all of it is about the interpreter")
        return
    log = (folder / f"{name}.log").read_text(errors="replace")
    context.check(name, status == 0, _counts(folder, name) if status in (0, 1) else f"status {status}: {log[-600:]}")


def _done(folder: Path, name: str) -> Path:
    return folder / f"{name}.done"


def _counts(folder: Path, name: str) -> str:
    done = _done(folder, name)
    outcomes = [line.split()[0] for line in done.read_text().splitlines()] if done.exists() else []
    return f"{outcomes.count('passed')} passed, {outcomes.count('failed')} failed"
