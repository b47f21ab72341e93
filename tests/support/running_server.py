"""A real launcher with its router and shards, for end-to-end tests: started once per module, ended by pid."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RunningServer:
    """A launcher process that answers on `url`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    def log(self, begin: int = 0) -> str:
        """What was written, from that byte on."""
        return self._log.read_bytes()[begin:].decode(errors="replace")

    def log_with(self, text: str, times: int = 1) -> str:
        """The log once it holds the text: a record goes through the launcher, behind those before it."""
        deadline = time.monotonic() + 30
        while (log := self.log()).count(text) < times:
            assert time.monotonic() < deadline, log[-3000:]
            time.sleep(0.05)
        return log

    def log_size(self) -> int:
        """Bytes."""
        return self._log.stat().st_size

    def health_status(self) -> int | None:
        """What /health answers; None if there is no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def is_healthy(self) -> bool:
        return self.health_status() == 200

    def wait_healthy(self, limit_s: float = START_LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise AssertionError(f"the launcher ended with {self.process.returncode}:\n{self.log()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not healthy after {limit_s:g} s:\n{self.log()}")
            time.sleep(0.05)

    def stop(self) -> int:
        """SIGTERM, and SIGKILL to the launcher if that is not enough; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(STOP_LIMIT_S)


@contextlib.contextmanager
def running_models(*words: str, environ: Mapping[str, str] | None = None) -> Iterator[RunningServer]:
    """Start `launcher serve WORDS` for several models, on a free port."""
    with running_server(None, *words, environ=environ, command=(sys.executable, "-m", "launcher", "serve")) as server:
        yield server


@contextlib.contextmanager
def running_server(
    model: str | Path | None,
    *options: str,
    environ: Mapping[str, str] | None = None,
    wait: bool = True,
    command: Sequence[str] = (sys.executable, "-m", "launcher"),
    cwd: Path | None = None,
) -> Iterator[RunningServer]:
    """Start `launcher --model-id MODEL` on a free port of 127.0.0.1 and stop it in the end."""
    with socket.socket() as holder, tempfile.TemporaryDirectory(prefix="tercet-test-") as folder:
        # Bound but not listening, it keeps the port from everybody who asks for any.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        log = Path(folder) / "log"
        words = [*command, *(() if model is None else ("--model-id", str(model))), "--hostname", "127.0.0.1"]
        if "--num-shard" in options:  # several servers may run at a time
            words += ["--master-port", str(free_port())]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*words, "--port", str(port), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environ or {})},
                cwd=cwd,
            )
        server = RunningServer(process, port, log)
        try:
            if wait:
                server.wait_healthy()
            yield server
        finally:
            server.stop()
