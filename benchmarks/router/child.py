"""Child processes that take one JSON command a line and answer one JSON line, and the CPU clock of any process."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop

Handler = Callable[..., Any]


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, with the kernel's nanosecond clock."""
    return time.clock_gettime(((~pid) << 3) | 2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """`python -m MODULE ARGUMENTS` at the other end of a pipe."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.ask("ready")

    @property
    def cpu_s(self) -> float:
        return cpu_seconds(self.process.pid)

    def ask(self, command: str, **arguments: Any) -> Any:
        """The child's answer. Raises RuntimeError with what the child wrote last if it is gone."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a child process ended:\n{self._log.read_text(errors='replace')[-2000:]}")
        return json.loads(line)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_child(setup: Callable[[], Awaitable[Mapping[str, Handler]]]) -> None:
    """The child's end: `setup` returns its commands. Returns when the parent closes the pipe."""
    uvloop.run(_obey(setup))


async def _obey(setup: Callable[[], Awaitable[Mapping[str, Handler]]]) -> None:
    handlers = await setup()
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        command, arguments = json.loads(line)
        answer = None if command == "ready" else handlers[command](**arguments)
        if inspect.isawaitable(answer):
            answer = await answer
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
