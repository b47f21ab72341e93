"""`--placement ray` on machines made of namespaces: a Ray head on one, a worker on the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from support import node_namespaces
from support.node_group import NodeGroup
from support.node_namespaces import Machine, Network, network, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long]

REASON = "Ray is not installed: pip install 'tercet[ray]'" if find_spec("ray") is None else node_namespaces.why_not()
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

LOST_NODE = 7
CLUSTER = "10.77.0.1:6379"
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class Placed:
    """A launcher on the head that places a group, and what the group's nodes do."""

    net: Network
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> None:
        wait_until(lambda: "Ready on" in self.text() or self.process.poll() is not None, "ready", 90)
        assert self.process.poll() is None, self.text()

    def found(self, number: int, part: str) -> list[psutil.Process]:
        """Processes of a machine whose command line has `part`."""
        return self.net.machines[number].running(part)

    def machine_of(self, rank: int) -> Machine:
        return next(one for one in self.net.machines if self.found(one.number, f"--node-rank {rank}"))

    def wait_gone(self, number: int) -> None:
        wait_until(lambda: not self.found(number, "--nnodes") and not self.found(number, "model_server"), "gone", 30)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Network]:
    folder = Path("/tmp") / f"tercet-ray-{os.getpid()}"  # short: Ray's sockets lie below it
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--num-cpus=1", "--object-store-memory=80000000"]
    try:
        with network(2) as net:
            head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
            for machine, words in zip(net.machines, (head, [f"--address={CLUSTER}"]), strict=True):
                command = machine.command(*ray, *words, f"--node-ip-address={machine.address}")
                done = subprocess.run(command, env=os.environ | TOKEN, capture_output=True, text=True, timeout=60)
                assert done.returncode == 0, done.stderr
            yield net
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def placed(net: Network, folder: Path, *options: str, **variables: str) -> Placed:
    words = [sys.executable, "-m", "launcher", "--placement", "ray", "--model-id", "demo", *options]
    env = os.environ | TOKEN | {"RAY_ADDRESS": CLUSTER, "OMP_NUM_THREADS": "1"} | variables
    log = folder / "launcher.log"
    with log.open("wb") as output:
        command = net.machines[0].command(*words)
        return Placed(net, subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT), log)


@pytest.mark.parametrize("lost", ["actor", "launcher", "placer"])
def test_a_group_serves_and_ends_as_one(cluster: Network, tmp_path: Path, lost: str) -> None:
    group = placed(cluster, tmp_path, "--nnodes", "2", "--port", "3000")
    try:
        group.wait_ready()
        leader, other = group.machine_of(0), group.machine_of(1)
        answer = NodeGroup(Network(leader, [leader]), tmp_path).generate(max_new_tokens=8)
        assert answer["details"]["generated_tokens"] == 8
        assert (leader.number, other.number) == (0, 1), "node 0 is where the command runs"
        if lost == "placer":
            psutil.Process(group.process.pid).children()[0].terminate()
        else:
            group.found(other.number, {"actor": "ray::NodeActor", "launcher": "--node-rank 1"}[lost])[0].kill()
        group.process.wait(60)
        for number in (0, 1):
            group.wait_gone(number)
        assert group.process.returncode == (0 if lost == "placer" else 1 if lost == "launcher" else LOST_NODE)
        assert lost == "placer" or f"node 1 ({other.address})" in group.text().splitlines()[-1], group.text()
    finally:
        group.process.kill()
        group.process.wait()


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (("--nnodes", "3"), {}, "`--nnodes` 3 needs 3 Ray nodes with 1 CPU each, but the cluster has 2 of 2 nodes"),
        (("--nnodes", "2"), {"RAY_AUTH_TOKEN": "f" * 64}, "refuses the token: set RAY_AUTH_MODE=token"),
        (("--nnodes", "2"), {"RAY_ADDRESS": "10.77.0.1:1"}, "no Ray cluster at 10.77.0.1:1 (RAY_ADDRESS)"),
        (("--nnodes", "2"), {"RAY_ADDRESS": ""}, "needs the variable RAY_ADDRESS, the HOST:PORT"),
    ],
)
def test_one_message_and_no_waiting(
    cluster: Network, tmp_path: Path, options: tuple[str, ...], variables: dict[str, str], words: str
) -> None:
    group = placed(cluster, tmp_path, *options, **variables)
    assert group.process.wait(60) == 1
    assert words in group.text().splitlines()[-1]


def test_nodes_that_other_work_holds(cluster: Network, tmp_path: Path) -> None:
    other = (tmp_path / "other", tmp_path / "late")
    for folder in other:
        folder.mkdir()
    first = placed(cluster, other[0], "--nnodes", "2", "--port", "3000")
    try:
        first.wait_ready()
        late = placed(cluster, other[1], "--nnodes", "2", "--port", "3001", "--join-timeout", "2")
        assert late.process.wait(60) == 1
        assert "other work holds them" in late.text().splitlines()[-1]
        assert first.process.poll() is None
    finally:
        psutil.Process(first.process.pid).children()[0].terminate()
        first.process.wait(60)


def test_a_raylet_that_is_killed_ends_the_group(cluster: Network, tmp_path: Path) -> None:
    """The last test: the cluster has one node fewer afterwards."""
    group = placed(cluster, tmp_path, "--nnodes", "2", "--port", "3000")
    try:
        group.wait_ready()
        group.found(1, "raylet/raylet")[0].kill()
        group.process.wait(90)
        for number in (0, 1):
            group.wait_gone(number)
        assert group.process.returncode == LOST_NODE
        assert f"({cluster.machines[1].address}) is lost" in group.text().splitlines()[-1], group.text()
    finally:
        group.process.kill()
        group.process.wait()
