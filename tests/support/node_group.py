"""A group of nodes: a launcher on each machine of a network of namespaces."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from support.node_namespaces import Machine, Network, wait_until

HTTP_PORT = 3000
TOKEN = "secret of the group"


def generation(parameters: dict[str, Any], prompt: str = "Once upon a time") -> dict[str, Any]:
    """The body of a request."""
    return {"inputs": prompt, "parameters": {"details": True} | parameters}


class Node:
    """A launcher on a machine."""

    def __init__(self, machine: Machine, log: Path, command: Sequence[str]) -> None:
        self.machine = machine
        self.log_path = log
        self._frozen: list[psutil.Process] = []
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                machine.command(*command), stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "GROUP_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """On standard error, which all end with; gRPC's own lines left out."""
        return next(line for line in reversed(self.log.splitlines()) if line.startswith("Error"))

    @property
    def status(self) -> int | None:
        """Exit status of the launcher, 128 + N after a signal; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def launcher(self) -> psutil.Process:
        (process,) = psutil.Process(self._process.pid).children()
        return process

    def shard(self) -> psutil.Process:
        return self.machine.running("model_server")[0]

    def freeze(self) -> None:
        """Stops all processes on the machine."""
        self._frozen = self.machine.processes()
        for process in self._frozen:
            process.suspend()

    def thaw(self) -> None:
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._process.send_signal(signal.SIGCONT)  # nsenter stops with its child

    def close(self) -> None:
        """Nothing of it runs afterwards, what starts a launcher left out or not."""
        started: list[psutil.Process] = []
        if self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                started = psutil.Process(self._process.pid).children(recursive=True)
        for process in started:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.send_signal(signal.SIGCONT)  # nsenter stops with its child
        self._process.wait(30)


class NodeGroup:
    """Launchers of one group, node 0 first."""

    def __init__(self, net: Network, folder: Path) -> None:
        self.net, self.folder = net, folder
        self.nodes: list[Node] = []
        self.api_key: str | None = None  # of requests

    def start(self, *options: str, size: int | None = None) -> None:
        """One launcher on each machine; `options` are those of node 0."""
        machines = self.net.machines[:size]
        for machine in machines:
            mine = ["--model-id", "demo", *options] if machine.number == 0 else []
            self.add(machine, "--nnodes", str(len(machines)), *mine)

    def add(self, machine: Machine, *options: str) -> Node:
        rank = ["--node-rank", str(machine.number)] if machine.number else ["--port", str(HTTP_PORT)]
        if "--port" in options:
            rank = []
        leader = ("--master-addr", self.net.machines[0].address)
        return self.add_command(machine, (sys.executable, "-m", "launcher", *leader, *rank, *options))

    def add_command(self, machine: Machine, command: Sequence[str]) -> Node:
        """Starts what starts a launcher."""
        node = Node(machine, self.folder / f"node-{len(self.nodes)}.log", command)
        self.nodes.append(node)
        return node

    def wait_ready(self) -> None:
        wait_until(lambda: "Ready on" in self.nodes[0].log or self.has_ended, "ready")
        assert "Ready on" in self.nodes[0].log, self.logs()

    @property
    def has_ended(self) -> bool:
        return any(node.status is not None for node in self.nodes)

    def wait_gone(self) -> None:
        """Until no launcher runs, and nothing that one had started."""
        wait_until(lambda: all(node.status is not None for node in self.nodes), "the end of all launchers")
        for node in self.nodes:
            wait_until(lambda node=node: not node.machine.processes(), f"no process on {node.machine}", 20)

    def logs(self) -> str:
        return "\n=====\n".join(node.log for node in self.nodes)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60) -> tuple[int, Any]:
        """Status and JSON of an answer of the router."""

        def ask() -> tuple[int, Any]:
            connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=timeout_s)
            headers = {"content-type": "application/json"}
            if self.api_key is not None:
                headers["authorization"] = f"Bearer {self.api_key}"
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
            connection.close()
            return response.status, json.loads(text) if text.startswith((b"{", b"[")) else text.decode()

        return self.net.machines[0].call(ask)

    def generate(self, prompt: str = "Once upon a time", **parameters: Any) -> dict[str, Any]:
        status, answer = self.ask("POST", "/generate", generation(parameters, prompt))
        assert status == 200, answer
        result: dict[str, Any] = answer
        return result


@contextlib.contextmanager
def node_group(net: Network, folder: Path) -> Iterator[NodeGroup]:
    group = NodeGroup(net, folder)
    try:
        yield group
    finally:
        for node in group.nodes:
            node.close()
