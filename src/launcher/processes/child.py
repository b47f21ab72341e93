"""One child process: its group, parent-death watchdog, readiness and exit; and the guard of all groups.

`poll` kills what is left of an ended child's group. When the launcher ends, the kernel's parent-death signal ends each
child and the guard each group (`parent_watchdog.py`).
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.command import Command, connection_to
from launcher.errors import LauncherError
from launcher.processes.child_logs import ChildLogs
from wire import phases
from wire.processes import stack_dump
from wire.processes.python_child import NEUTRAL_FOLDER, script_command

logger = logging.getLogger("text_generation_launcher")

HEALTH_METHOD = "/generate.v3.TextGenerationService/Health"
_WATCHDOG = script_command(Path(__file__).with_name("parent_watchdog.py"))
_PROBE_TIMEOUT_S = 5.0
_OUTPUT_AFTER_EXIT_S = 2.0
_HINTS = {
    signal.SIGILL: "the CPU lacks an instruction that the installed libraries need",
    signal.SIGABRT: "it aborted itself; often a collective operation that timed out",
    signal.SIGBUS: "often /dev/shm is too small (docker: --shm-size 1g)",
    signal.SIGKILL: "killed from outside; often the kernel because the machine is out of memory",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGTERM: "terminated from outside",
}


@dataclass(frozen=True)
class Exit:
    """How a process ended: a status, or minus the number of the signal."""

    returncode: int

    @property
    def is_signal(self) -> bool:
        return self.returncode < 0

    def __str__(self) -> str:
        if not self.is_signal:
            return f"exited with status {self.returncode}"
        try:
            number = signal.Signals(-self.returncode)
        except ValueError:
            return f"was killed by signal {-self.returncode}"
        hint = _HINTS.get(number)
        return f"was killed by signal {number.value} ({number.name})" + (f": {hint}" if hint else "")


class Guard:
    """The process that kills what a killed launcher leaves. Without it (`None` inside) only the watchdogs do."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [*_WATCHDOG, "guard"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, cwd=NEUTRAL_FOLDER,
            )  # fmt: skip

    def watch(self, group: int) -> None:
        self._send(f"watch {group}")

    def forget(self, group: int) -> None:
        self._send(f"forget {group}")

    def remove_at_end(self, directory: str) -> None:
        self._send(f"remove {directory}")

    def close(self) -> None:
        """Ends the guard, and with it every group that was not forgotten."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2.0)

    def _send(self, text: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(text.encode() + b"\n")
                self._process.stdin.flush()


class Child:
    """A started process; made on the main thread only, which the parent-death signal is tied to."""

    def __init__(self, command: Command, guard: Guard) -> None:
        """Starts it. Raises OSError if the interpreter itself cannot be started."""
        self.command = command
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        self.exit: Exit | None = None
        self._is_asked_to_end = False
        self._guard = guard
        self._probe = _probe_for(command)
        self._process = subprocess.Popen(
            [*_WATCHDOG, "exec", str(os.getpid()), *command.argv],
            env={**command.env, phases.VARIABLE: "1"}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            umask=0o077 if command.private_files else -1,
        )  # fmt: skip
        guard.watch(self._process.pid)
        assert self._process.stdout is not None and self._process.stderr is not None
        # Copies, so that each descriptor has one owner: the reading threads these, Popen its own, closed at once.
        streams = [os.dup(stream.fileno()) for stream in (self._process.stdout, self._process.stderr)]
        self._process.stdout.close()
        self._process.stderr.close()
        self.logs = ChildLogs(command.name, command.rank, *streams, model=command.model)

    @property
    def title(self) -> str:
        return self.command.title

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Exit | None:
        """Return how it ended, if it did, after its group is killed and its output read."""
        if self.exit is None and self._has_ended():
            # Before it is reaped the group's number cannot belong to another process.
            self.kill()
            self.exit = Exit(self._process.wait())
            self._guard.forget(self._process.pid)
            self.logs.finish(_OUTPUT_AFTER_EXIT_S)
        return self.exit

    def _has_ended(self) -> bool:
        # Left unreaped (WNOWAIT), see poll.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def is_ready(self) -> bool:
        """Whether it has ever answered its health question. Never waits: a question stays open between calls."""
        if self.ready_at is None and self._probe.is_answered():
            self.ready_at = time.monotonic()
        return self.ready_at is not None

    def terminate(self) -> None:
        """Ask the child alone to end, once: a second signal would make a draining router drop requests."""
        if self.exit is None and not self._is_asked_to_end:
            self._is_asked_to_end = True
            os.kill(self._process.pid, signal.SIGTERM)

    def read_again(self) -> None:
        """Make a router read its file of API keys."""
        if self.exit is None:
            os.kill(self._process.pid, signal.SIGUSR2)

    def ask_for_stacks(self) -> None:
        """Make the child print its threads' stacks on standard error."""
        if self.exit is None:
            os.kill(self._process.pid, stack_dump.SIGNAL)

    @property
    def state(self) -> str:
        """What the kernel says that it does: `S (sleeping)`, `T (stopped)`; empty if it is gone."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                if line.startswith("State:"):
                    return line.partition(":")[2].strip()
        return ""

    def kill(self) -> None:
        """Kills its whole group."""
        if self.exit is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def start_child(command: Command, guard: Guard, error: type[LauncherError]) -> Child:
    """Start a process, or raise `error`."""
    logger.debug("Starting %s: %s", command.title, " ".join(command.argv))
    try:
        return Child(command, guard)
    except OSError as cause:
        raise error(f"{command.title}: {command.argv[0]}: {cause.strerror}") from cause


class _Probe(Protocol):
    def is_answered(self) -> bool:
        """Whether health was affirmed. Returns at once."""
        ...


def _probe_for(command: Command) -> _Probe:
    if command.socket is not None:
        return _ShardProbe(command.socket)
    if command.url is not None:
        return _HttpProbe(command.url)
    return _NeverReady()


class _NeverReady:
    def is_answered(self) -> bool:
        return False


class _ShardProbe:
    """gRPC Health over the shard's socket, with empty bytes for the empty messages: no stubs needed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._call: Any = None
        self._channel: Any = None

    def is_answered(self) -> bool:
        # Here, not above: the import takes 0.2 s, which pass while the shard loads instead of before it starts.
        import grpc

        if self._call is None:
            if not os.path.exists(self._path):
                return False
            # A channel for each question: one that was refused waits a second before it connects again.
            options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
            self._channel = grpc.insecure_channel(f"unix:{os.path.abspath(self._path)}", options)
            self._call = self._channel.unary_unary(HEALTH_METHOD).future(b"", timeout=_PROBE_TIMEOUT_S)
        if not self._call.done():
            return False
        is_healthy = self._call.code() is grpc.StatusCode.OK
        self._channel.close()
        self._call = self._channel = None
        return is_healthy


class _HttpProbe:
    """GET /health, asked by a thread, because a server that is busy may take its time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_healthy = False
        self._thread: threading.Thread | None = None

    def is_answered(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return False
        if not self._is_healthy:
            self._thread = threading.Thread(target=self._ask, name="health", daemon=True)
            self._thread.start()
            self._thread.join(0.005)  # A refused connection is known at once.
        return self._is_healthy

    def _ask(self) -> None:
        connection = connection_to(self._url, _PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            self._is_healthy = connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            self._is_healthy = False
        finally:
            connection.close()
