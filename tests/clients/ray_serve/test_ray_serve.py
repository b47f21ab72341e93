"""deploy/ray/serve.py: two replicas of the demo model behind Ray Serve, on a machine made of namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))
from support import node_namespaces  # noqa: E402
from support.node_namespaces import Machine, wait_until  # noqa: E402

BIN = Path(sys.executable).parent
URL = "http://127.0.0.1:8000"
PROMPT = {"inputs": "What is two plus two?", "parameters": {"max_new_tokens": 12}}

REASON = node_namespaces.why_not()
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)


class Served:
    """The application on its machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def ask(self, path: str, body: dict[str, object] | None = None, url: str = URL) -> httpx.Response:
        def ask() -> httpx.Response:
            with httpx.Client(base_url=url, timeout=60) as client:
                return client.get(path) if body is None else client.post(path, json=body)

        return self.machine.call(ask)

    def is_healthy(self) -> bool:
        try:
            return self.ask("/health").status_code == 200
        except httpx.TransportError:
            return False

    def launchers(self) -> list[psutil.Process]:
        """Those that have started, their children left out."""
        found = []
        for process in self.machine.processes():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:3] == ["-m", "launcher"]:
                    found.append(process)
        return found

    def answered(self, launcher: psutil.Process) -> int:
        """Requests that this launcher's server has answered."""
        words = launcher.cmdline()
        metrics = self.ask("/metrics", url=f"http://127.0.0.1:{words[words.index('--port') + 1]}").text
        counts = [line.split()[-1] for line in metrics.splitlines() if line.startswith("tgi_request_success")]
        return sum(int(float(count)) for count in counts)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    folder = Path("/tmp") / f"tercet-serve-{os.getpid()}"  # short: Ray's sockets lie below it
    env = os.environ | {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    head = ["start", "--head", "--num-cpus=2", "--include-dashboard=false", "--object-store-memory=80000000"]
    options = ["model=demo", "replicas=2", f"launcher={os.environ['TERCET_PYTHON']} -m launcher"]
    example = str(ROOT / "deploy" / "ray")
    with node_namespaces.network(1) as net, (tmp_path / "serve.log").open("wb") as log:
        machine = net.machines[0]
        start = machine.command(str(BIN / "ray"), *head, f"--node-ip-address={machine.address}", f"--temp-dir={folder}")
        address = ["--address", f"{machine.address}:6379"]
        run = [str(BIN / "serve"), "run", *address, "--working-dir", example, "--app-dir", example]
        try:
            subprocess.run(start, env=env, check=True, timeout=60, stdout=log, stderr=log)
            command = machine.command(*run, "serve:build", *options)
            with subprocess.Popen(command, env=env, stdout=log, stderr=log) as process:
                made = Served(machine)
                wait_until(lambda: made.is_healthy() or process.poll() is not None, "Ray Serve", 90)
                assert process.poll() is None, (tmp_path / "serve.log").read_text()
                yield made
                for one in machine.processes():
                    with contextlib.suppress(psutil.Error):
                        one.kill()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def test_replicas_pass_on_and_are_replaced(served: Served) -> None:
    wait_until(lambda: len(served.launchers()) == 2, "two launchers")
    assert [served.ask("/generate", PROMPT).status_code for _ in range(8)] == [200] * 8
    assert sum(map(served.answered, served.launchers())) == 8
    refused = served.ask("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 0}})
    assert refused.status_code == 422 and "max_new_tokens" in refused.text
    streamed = served.ask("/generate_stream", PROMPT)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.count("data:") > 5 and '"generated_text":"' in streamed.text

    killed, other = served.launchers()
    killed.kill()
    wait_until(lambda: killed not in served.launchers() and len(served.launchers()) == 2, "a replica in its place")
    assert other in served.launchers()
    wait_until(served.is_healthy, "health")
    assert served.ask("/generate", PROMPT).status_code == 200

    replica = other.parent()
    assert replica is not None and "Server" in " ".join(replica.cmdline())
    replica.kill()
    wait_until(lambda: other not in served.launchers(), "the end of the launcher of a killed replica", 20)
