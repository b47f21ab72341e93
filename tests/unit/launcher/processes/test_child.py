"""One process: readiness, its end, the end of what it started; and the end of everything when the launcher dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unit.launcher.fake_children import plain, router, shard, wait_until_gone

from launcher.command import Command
from launcher.processes import parent_watchdog
from launcher.processes.child import Child, Exit, Guard

LIMIT_S = 60.0
SPAWN_A_GRANDCHILD = (
    "import subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
    'print(\'{"level": "INFO", "message": "%d"}\' % p.pid, flush=True)\n'
)


@pytest.fixture
def guard() -> Iterator[Guard]:
    made = Guard()
    yield made
    made.close()


@contextlib.contextmanager
def started(command: Command, guard: Guard) -> Iterator[Child]:
    child = Child(command, guard)
    try:
        yield child
    finally:
        child.kill()
        until(lambda: child.poll() is not None)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_shard_is_ready_when_health_is_answered(tmp_path: Path, guard: Guard) -> None:
    with started(shard(tmp_path), guard) as child:
        assert not child.is_ready()
        until(child.is_ready)
        assert child.ready_at is not None and child.ready_at >= child.started_at
        child.terminate()
        until(lambda: child.poll() is not None)
        assert child.exit == Exit(0)
        assert child.logs.last_message == "shard is up"


def test_a_file_is_not_an_answer(tmp_path: Path, guard: Guard) -> None:
    command = shard(tmp_path, program="import socket, sys, time; s = socket.socket(socket.AF_UNIX);"
                                      "s.bind(sys.argv[1]); s.listen(); time.sleep(600)")  # fmt: skip
    with started(command, guard) as child:
        until((tmp_path / "s-0").exists)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert not child.is_ready()
            time.sleep(0.05)


def test_a_router_is_ready_when_health_says_200(tmp_path: Path, guard: Guard) -> None:
    with started(router(tmp_path, free_port()), guard) as child:
        until(child.is_ready)


def test_a_router_that_is_unwell_is_not_ready(tmp_path: Path, guard: Guard) -> None:
    program = (
        "import http.server, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    count = 0\n"
        "    def do_GET(self):\n"
        "        H.count += 1\n"
        "        self.send_response(200 if H.count > 3 else 503); self.end_headers()\n"
        "    def log_message(self, *_): print('asked', H.count, flush=True)\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    with started(router(tmp_path, free_port(), program=program), guard) as child:
        until(child.is_ready)


@pytest.mark.parametrize(
    ("program", "returncode", "text"),
    [
        ("pass", 0, "exited with status 0"),
        ("import sys; sys.exit(3)", 3, "exited with status 3"),
        ("import os; os.kill(os.getpid(), 9)", -9, "was killed by signal 9 (SIGKILL): killed from outside"),
        ("import os; os.abort()", -6, "was killed by signal 6 (SIGABRT)"),
    ],
)
def test_how_it_ended(program: str, returncode: int, text: str, guard: Guard) -> None:
    with started(plain(program), guard) as child:
        until(lambda: child.poll() is not None)
        assert child.exit == Exit(returncode)
        assert str(child.exit).startswith(text)


def test_unknown_signal() -> None:
    assert str(Exit(-99)) == "was killed by signal 99"


def test_all_of_standard_error_is_there_at_the_end(guard: Guard) -> None:
    with started(plain("import sys; sys.stderr.write('x\\n' * 1500); sys.stderr.write('last')"), guard) as child:
        until(lambda: child.poll() is not None)
        lines = "\n".join(child.logs.errors.chunks()).splitlines()
        assert len(lines) == 1501 and lines[-1] == "last"


def test_a_program_that_does_not_exist(guard: Guard) -> None:
    with started(Command(name="router", argv=("/no/such/program",), env=dict(os.environ)), guard) as child:
        until(lambda: child.poll() is not None)
        assert child.exit == Exit(127)
        assert "/no/such/program: No such file" in "".join(child.logs.errors.chunks())


def test_what_it_started_goes_with_it(guard: Guard) -> None:
    with started(plain(SPAWN_A_GRANDCHILD), guard) as child:
        until(lambda: child.poll() is not None)
        assert child.exit == Exit(0)
        assert wait_until_gone([int(child.logs.last_message)], LIMIT_S) == []


def test_terminate_spares_what_it_started(guard: Guard) -> None:
    handler = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(p.poll() is not None))\n"
    with started(plain(handler + SPAWN_A_GRANDCHILD + "p.wait()"), guard) as child:
        until(lambda: child.logs.last_message != "")
        child.terminate()
        until(lambda: child.poll() is not None)
        assert child.exit == Exit(0)


def test_children_have_their_own_group_and_no_input(guard: Guard) -> None:
    program = (
        "import os, sys; sys.exit(0 if os.getpgid(0) == os.getpid() == os.getsid(0) and not sys.stdin.read() else 1)"
    )
    with started(plain(program), guard) as child:
        until(lambda: child.poll() is not None)
        assert child.exit == Exit(0)


_LAUNCHER = f"""
import os, sys, time
from launcher.processes.child import Child, Guard
from launcher.command import Command
guard = Guard()
guard.remove_at_end(sys.argv[1])
program = {SPAWN_A_GRANDCHILD + "time.sleep(600)"!r}
child = Child(Command(name="shard", argv=(sys.executable, "-c", program), env=dict(os.environ)), guard)
while not child.logs.last_message:
    time.sleep(0.01)
print(child.pid, child.logs.last_message, guard._process.pid, flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def doomed_launcher(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int, int, int]]:
    with subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            child, grandchild, guard = map(int, process.stdout.readline().split())
            yield process, child, grandchild, guard
        finally:
            process.kill()


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    with doomed_launcher(folder) as (process, child, grandchild, guard):
        process.send_signal(signal.SIGKILL)
        assert wait_until_gone([child, grandchild, guard], LIMIT_S) == []
        assert not folder.exists()


_KILLED_AT_ONCE = """
import os, signal
from launcher.planning.preflight import private_directory
from launcher.processes.child import Guard
guard = Guard()
with private_directory({}, guard.remove_at_end) as folder:
    os.write(1, f"{guard._process.pid} {folder}".encode())
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_killed_before_it_has_children_leaves_no_folder() -> None:
    answer = subprocess.run([sys.executable, "-c", _KILLED_AT_ONCE], stdout=subprocess.PIPE, text=True, check=False)
    guard, _, folder = answer.stdout.partition(" ")
    assert answer.returncode == -signal.SIGKILL
    assert wait_until_gone([int(guard)], LIMIT_S) == []
    assert folder and not Path(folder).exists()


def test_a_socket_made_while_its_folder_is_removed_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    real, late = shutil.rmtree, [folder / "shard-0", folder / "shard-1"]

    def removing(path: str, ignore_errors: bool) -> None:
        if late:
            late.pop().touch()
            return
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(parent_watchdog.shutil, "rmtree", removing)
    parent_watchdog.remove(str(folder))
    assert not folder.exists()


def test_without_its_guard_the_watchdog_still_kills(tmp_path: Path) -> None:
    with doomed_launcher(tmp_path / "none") as (process, child, grandchild, guard):
        os.kill(guard, signal.SIGKILL)
        process.send_signal(signal.SIGKILL)
        try:
            assert wait_until_gone([child], LIMIT_S) == []
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_the_watchdog_notices_a_parent_that_died_first() -> None:
    from launcher.processes import child as module

    watchdog = [*module._WATCHDOG, "exec", "1", sys.executable, "-c", "print('ran')"]
    answer = subprocess.run(watchdog, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (1, "")
