"""A worker from the router's side: started, asked over pipes, killed when late. The first, empty frame says that it is
ready.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence

from wire.processes.python_child import NEUTRAL_FOLDER, child_environment, module_command
from wire.worker.frames import frame, read_frame

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_PIPE_BYTES = 1 << 20
_TRIES = 2
# A process has bounds on its address space, in which each thread of a library takes a part, and it forks.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


_SECRET_WORDS = frozenset({"AUTHTOKEN", "KEY", "KEYS", "PASSWORD", "SECRET", "TOKEN", "TOKENS"})


def _without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """A process that works on what clients send needs no API key and no token of a hub."""
    return {name: value for name, value in environ.items() if not _SECRET_WORDS & set(name.upper().split("_"))}


class WorkerEndedError(ConnectionError):
    """Two processes ended over a frame, which is at fault."""


class WorkerProcess:
    """`python -m MODULE`, started when needed; for one thread, except `kill`."""

    def __init__(self, module: str, arguments: Sequence[str] = ()) -> None:
        self._module = module
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """While it is ready for frames, or has one."""
        process = self._process
        return process.pid if process is not None and self._is_ready else None

    @property
    def is_closed(self) -> bool:
        """Whether it was killed for good."""
        return self._is_closed

    def start(self) -> subprocess.Popen[bytes]:
        """Returns when it is ready. Raises OSError, but no TimeoutError."""
        return self._process or self._start()

    def exchange(self, data: bytes, timeout_s: float) -> bytes:
        """Return the answer to a frame, tried in a second process if the first ends.

        Args:
            timeout_s: Of each try, without the start.

        Raises:
            TimeoutError: Not tried again.
            WorkerEndedError, OSError: It ended, or did not start.
        """
        for _ in range(_TRIES - 1):
            try:
                return self._exchange(data, timeout_s)
            except TimeoutError:
                raise
            except OSError as error:
                if self._is_closed:
                    raise
                logger.warning("the worker process %s is started again: %s", self._module, error)
        return self._exchange(data, timeout_s)

    def kill(self) -> None:
        """The thread finds out by itself; there will be no other process."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> None:
        """Without a trace; the next exchange starts another one."""
        process, self._process = self._process, None
        self._is_ready = False
        if process is None:
            return
        process.kill()
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()

    def _exchange(self, data: bytes, timeout_s: float) -> bytes:
        process = self.start()
        deadline = time.monotonic() + timeout_s
        try:
            _send(process, data, deadline)
            return _receive(process, deadline)
        except TimeoutError:
            self.end()
            raise
        except OSError:
            self.end()
            raise WorkerEndedError(f"it ended with status {process.returncode}") from None

    def _start(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise ConnectionAbortedError("the server is stopping")
        process = subprocess.Popen(
            (*module_command(self._module), *self._arguments),
            env=_without_secrets(child_environment()) | _ONE_THREAD,
            cwd=NEUTRAL_FOLDER,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        try:
            if self._is_closed:  # while it was being started
                process.kill()
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            _receive(process, time.monotonic() + _START_TIMEOUT_S)
        except TimeoutError:
            self.end()
            raise ConnectionError(f"not ready after {_START_TIMEOUT_S:g} s") from None
        except OSError:
            self.end()
            raise
        self._is_ready = True
        return process


def _send(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    """Raises TimeoutError, and BrokenPipeError if the process has ended."""
    assert process.stdin is not None
    descriptor = process.stdin.fileno()
    rest = memoryview(frame(data))
    while rest:
        _wait(descriptor, select.POLLOUT, deadline)
        rest = rest[os.write(descriptor, rest[:_PIPE_BYTES]) :]


def _receive(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Raises TimeoutError, and ConnectionError if the process has ended."""
    return read_frame(lambda count: _receive_exactly(process, count, deadline))


def _receive_exactly(process: subprocess.Popen[bytes], count: int, deadline: float) -> bytes:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        _wait(descriptor, select.POLLIN, deadline)
        num_read = os.readv(descriptor, [rest[:_PIPE_BYTES]])
        if not num_read:
            raise ConnectionResetError("the process has ended")
        rest = rest[num_read:]
    return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()  # select() itself is limited to the first 1024 descriptors
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
