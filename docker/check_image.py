"""`python docker/check_image.py IMAGE`: an image under the strictest settings, before it is published.

Needs only docker or podman (`--engine`), this file and Python. With a read-only root, no capabilities and no way to new
privileges: the first process is the launcher and not owned by root, the demo model answers, /info names the build,
the image's own health check succeeds, only the declared paths can be written, and a signal stops it in order.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

_NAME = f"tercet-check-{os.getpid()}"
_HARDENED = (
    "--read-only", "--tmpfs", "/tmp:rw,noexec,nosuid,nodev,size=1g", "--cap-drop", "ALL",
    "--security-opt", "no-new-privileges", "--shm-size", "1g",
)  # fmt: skip
_HEALTH = ("/opt/tercet/bin/python", "-I", "/opt/tercet/docker/healthcheck.py")
_WRITABLE = {"/data", "/tmp", "/dev/shm", "/dev/mqueue"}
"""Of these the last two are the engine's, as in every container."""


class Failed(Exception):
    """The image is not as it should be."""


class Container:
    def __init__(self, engine: Sequence[str], image: str, options: Sequence[str], data: Path) -> None:
        self._engine = engine
        with socket.create_server(("127.0.0.1", 0)) as held:
            self.port = held.getsockname()[1]
        command = ["run", "--detach", "--name", _NAME, *_HARDENED, "-v", f"{data}:/data"]
        command += ["--network", "host", "-e", f"PORT={self.port}", *options, image]
        self.run(*command, "--model-id", "demo", "--hostname", "127.0.0.1")

    def run(self, *words: str, timeout_s: float = 120.0) -> str:
        """What the engine says. Raises Failed if it fails."""
        done = subprocess.run([*self._engine, *words], capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode != 0:
            raise Failed(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def execute(self, *words: str) -> str:
        return self.run("exec", _NAME, *words)

    def logs(self) -> str:
        done = subprocess.run([*self._engine, "logs", _NAME], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def get(self, path: str, body: dict[str, object] | None = None) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())


def wait_until_healthy(container: Container, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            container.get("/health")
            return
        except (OSError, urllib.error.URLError):
            if time.monotonic() > deadline:
                raise Failed(f"not healthy after {limit_s:g} s") from None
        if container.run("inspect", "--format", "{{.State.Running}}", _NAME) != "true":
            raise Failed("the container has ended")
        time.sleep(0.5)


def check_process(container: Container) -> str:
    status = dict(line.split(":", 1) for line in container.execute("cat", "/proc/1/status").splitlines())
    argv = container.execute("cat", "/proc/1/cmdline").split("\0")
    if "/opt/tercet/bin/launcher" not in argv:
        raise Failed(f"the first process is {argv}")
    if "0" in status["Uid"].split() or int(status["CapEff"], 16) or status["NoNewPrivs"].strip() != "1":
        raise Failed(f"it has rights: {status['Uid']} {status['CapEff']} {status['NoNewPrivs']}")
    return f"the launcher is process 1, user {status['Uid'].split()[0]}, without capabilities"


def check_answer(container: Container) -> str:
    body: dict[str, object] = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}
    text = json.loads(container.get("/generate", body))["generated_text"]
    if "Paris" not in text:
        raise Failed(f"a strange answer: {text!r}")
    return f"the demo model answers {text!r}"


def check_build(container: Container) -> str:
    info = json.loads(container.get("/info"))
    variables = dict(line.partition("=")[::2] for line in container.execute("env").splitlines())
    for key, variable in (("sha", "GIT_SHA"), ("docker_label", "DOCKER_LABEL")):
        if info[key] != (variables.get(variable) or None):
            raise Failed(f"/info says {key} {info[key]!r}, the image {variables.get(variable)!r}")
    return f"/info: sha {info['sha']}, docker_label {info['docker_label']}"


def check_health(container: Container) -> str:
    container.execute(*_HEALTH)
    return "the image's health check agrees"


def check_writable(container: Container) -> str:
    """Every mount point that this user can write to."""
    find = 'cut -d\' \' -f2 /proc/mounts | sort -u | while read -r m; do [ -d "$m" ] && [ -w "$m" ] && echo "$m"; done'
    found = set(container.execute("sh", "-c", f"{find}; true").splitlines())
    found = {place for place in found if not place.startswith(("/proc", "/sys"))}
    if not {"/data", "/tmp"} <= found <= _WRITABLE:
        raise Failed(f"writable: {sorted(found)}")
    return f"writable: {', '.join(sorted(found))}"


def check_operators(container: Container) -> str:
    logs = container.logs()
    line = next((line for line in logs.splitlines() if "C++ operators" in line), "")
    if "C++ operators for" not in line and "Device cuda" not in logs:
        raise Failed(f"no operators for this CPU: {line or 'nothing is said of them'}")
    return line.partition(": ")[0].strip() if line else "a GPU is used"


def check_end(container: Container) -> str:
    began = time.monotonic()
    container.run("kill", "--signal", "TERM", _NAME)
    status = container.run("wait", _NAME)
    if status != "0":
        raise Failed(f"exit status {status} after SIGTERM")
    return f"SIGTERM ends it in order, in {time.monotonic() - began:.1f} s"


_CHECKS: tuple[Callable[[Container], str], ...] = (
    check_process, check_answer, check_build, check_health, check_writable, check_operators, check_end,
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image")
    parser.add_argument("--engine", default="docker", help="the engine's command (default: docker)")
    parser.add_argument("--option", action="append", default=[], help="one more word for `run`; repeatable")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds until it must be healthy")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tercet-data-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o777)
        engine, container = shlex.split(asked.engine), None
        try:
            container = Container(engine, asked.image, asked.option, Path(folder))
            wait_until_healthy(container, asked.limit)
            for check in _CHECKS:
                sys.stdout.write(f"ok: {check(container)}\n")
        except (Failed, OSError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"{container.logs() if container else ''}\nFAILED: {error}\n")
            return 1
        finally:
            subprocess.run([*engine, "rm", "--force", _NAME], capture_output=True, check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
