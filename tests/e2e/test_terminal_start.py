"""The launcher on a terminal: a dozen lines until it serves, a line for each request, one line for an error."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from support.screen import screen

pytestmark = pytest.mark.e2e

LIMIT_S = 240


class Started:
    """A launcher whose standard streams are a terminal."""

    def __init__(self, *options: str) -> None:
        ours, theirs = pty.openpty()
        self._terminal = ours
        self._read = b""
        command = [sys.executable, "-m", "launcher", "--hostname", "127.0.0.1", *options]
        environ = {**os.environ, "TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", "LOG_COLORIZE": "0"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
        )
        os.close(theirs)

    def until(self, is_there: Callable[[list[str]], bool]) -> list[str]:
        """The screen as soon as it holds that, or at the end of the process."""
        deadline = time.monotonic() + LIMIT_S
        while not is_there(self._lines()) and time.monotonic() < deadline:
            if select.select([self._terminal], [], [], 1.0)[0]:
                with contextlib.suppress(OSError):  # Linux: nobody has the other end any more
                    if data := os.read(self._terminal, 65536):
                        self._read += data
                        continue
                break
        return self._lines()

    def _lines(self) -> list[str]:
        return [line for line in screen(self._read.decode(errors="replace")) if line]

    def end(self) -> int:
        try:
            self.process.send_signal(signal.SIGINT)
            return self.process.wait(LIMIT_S)
        finally:
            os.close(self._terminal)


@contextlib.contextmanager
def started(*options: str) -> Iterator[Started]:
    launch = Started(*options)
    try:
        yield launch
    finally:
        if launch.process.poll() is None:
            launch.process.kill()
            launch.process.wait()


def has(words: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(words in line for line in lines)


@pytest.mark.parametrize(
    "num_shard", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.weekly)]
)
def test_a_start_and_a_request(num_shard: int) -> None:
    with started("--model-id", "demo", "--port", "0", "--num-shard", str(num_shard)) as launch:
        lines = launch.until(has("Ready after"))
        assert len(lines) <= 12 + (num_shard // 2 if num_shard > 1 else 0), lines
        rows = dict(line.split(maxsplit=1) for line in lines)
        assert rows["model"] == "demo" and rows["key"].startswith("not required")
        assert "4095 tokens in a prompt, 4096 with its answer" in rows["limits"]
        url = rows["address"].split()[0]
        body = b'{"inputs": "Hello", "parameters": {"max_new_tokens": 3}}'
        request = urllib.request.Request(f"{url}/generate", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/generat", timeout=LIMIT_S)
        lines = launch.until(has("404 GET"))
        assert [line.split("  ")[1] for line in lines[-2:]] == ["200 POST /generate", "404 GET /generat"]
        assert re.search(r"\d tokens in, 3 out", lines[-2])
        assert launch.end() == 0


def test_an_error_is_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with started("--model-id", "demo", "--port", str(port)) as launch:
            lines = launch.until(lambda _: False)
            assert lines == [f"error: --port {port} is in use by another process; choose another"]
            assert launch.process.wait(LIMIT_S) == 1
