"""A job in a fork, in a millisecond or two: ended at any moment, without memory left; for uninterruptible libraries."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType

from wire.worker.frames import LATE

_BLOCK = 1 << 16
_PDEATHSIG = 1  # <sys/prctl.h>
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


class JobEndedError(Exception):
    """The fork ended without an answer."""


class Forked:
    """Runs a job at a time; SIGALRM, for a disconnected client, ends it."""

    def __init__(self) -> None:
        self._child: int | None = None
        signal.signal(signal.SIGALRM, self._alarm)

    def run(self, work: Callable[[], bytes], limit_s: float) -> bytes:
        """What `work` returns, LATE after `limit_s`. Raises JobEndedError."""
        reading, writing = os.pipe()
        worker = os.getpid()
        self._child = os.fork()
        if not self._child:
            _run_in_child(work, limit_s, writing, worker)
        os.close(writing)
        with open(reading, "rb", buffering=0) as answers:
            data = answers.readall()
        _, status = os.waitpid(self._child, 0)
        self._child = None
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            return LATE
        if status or not data:
            raise JobEndedError
        return data

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGALRM)


def _run_in_child(work: Callable[[], bytes], limit_s: float, writing: int, worker: int) -> None:
    """Does not return."""
    status = 1
    try:
        if _PRCTL is not None:
            _PRCTL(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != worker:
            return  # the worker was killed before that call, and the router waits while this holds its output
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        rest = memoryview(work())
        while rest:
            rest = rest[os.write(writing, rest[:_BLOCK]) :]
        status = 0
    finally:
        os._exit(status)
