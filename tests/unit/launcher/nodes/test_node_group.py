"""From options to a node's place: the commit, the machine of all nodes, the part of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.hub_server import HubServer

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation, LauncherError
from launcher.nodes import address, group
from launcher.nodes.node_group import CommitOf, NodeGroup, Pause
from launcher.planning.hardware import Gpu, Hardware
from launcher.processes.signals import Signals
from wire.node.v1 import node_pb2 as pb

_COMMIT = """
import os
from launcher.config import LauncherConfig
from launcher.nodes.group import commit_of
print(commit_of(LauncherConfig(model_id="owner/name"), os.environ))
"""


def _commit(environ: dict[str, str]) -> str:
    """In a process of its own: the hub library reads the environment when it is imported."""
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    done = subprocess.run([sys.executable, "-c", _COMMIT], env=known, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_commit_is_the_hubs_and_else_the_caches(tmp_path: Path) -> None:
    with HubServer() as hub:
        repository = hub.add("owner/name", {"config.json": b"{}"})
        newer = repository.commit({"config.json": b"{ }"}, "main")
        environ = hub.environment(tmp_path)
        assert _commit(environ) == newer
    folder = tmp_path / "hub" / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    assert group.commit_of(LauncherConfig(model_id="owner/name"), {**environ, "HF_HUB_OFFLINE": "1"}) == "abc"


def test_a_directory_has_no_commit() -> None:
    assert group.commit_of(LauncherConfig(model_id="demo"), {}) == ""


def test_the_nodes_as_one_machine() -> None:
    machine = group.whole(Hardware(gpus=(Gpu(), Gpu()), cores=4, memory_bytes=100), 3)
    assert (len(machine.gpus), machine.cores, machine.memory_bytes) == (6, 12, 300)
    assert group.whole(Hardware(), 2).memory_bytes is None


@pytest.mark.parametrize(
    ("machine", "asked", "shards"), [(Hardware(), None, 3), (Hardware(), 6, 6), (Hardware(gpus=(Gpu(),)), None, None)]
)
def test_without_gpus_each_node_has_a_shard(machine: Hardware, asked: int | None, shards: int | None) -> None:
    config = LauncherConfig(nnodes=3, num_shard=asked)
    assert group.with_shards(config, machine).num_shard == shards


class _Met(NodeGroup):
    """Has met the others at once."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.said = pb.Prepared()

    def join(self, config: LauncherConfig, commit_of: CommitOf, pause: Pause) -> LauncherConfig:
        return config

    def meet(self, own: pb.Prepared, pause: Pause) -> pb.Start:
        self.said = own
        endpoints = ["unix:///run/0", own.endpoint]
        return pb.Start(store_address="10.0.0.1", store_port=5, nonce=b"n", endpoints=endpoints)

    def end(self, error: LauncherError) -> LauncherError:
        return error

    def close(self) -> None:
        pass


def _meet(met: _Met, num_shard: int = 4, token: str | None = "t") -> tuple[group.NodePart, int]:
    config = LauncherConfig(nnodes=2, node_rank=1, group_token=token)
    return group.meet(config, met, Path("/none"), {}, num_shard, "/run/shard", lambda seconds: None)


def test_the_part_of_a_node() -> None:
    met = _Met()
    part, port = _meet(met)
    assert met.said.endpoint.startswith("tcp://127.0.0.1:")
    assert (part.node_rank, part.num_nodes, part.store_address, port) == (1, 2, "10.0.0.1", 5)
    assert part.interface == "lo"
    assert part.endpoints == ("unix:///run/0", met.said.endpoint)


def test_keys_depend_on_the_token() -> None:
    prefixes = {_meet(_Met(), token=token)[0].key_prefix for token in ("a", "b", None)}
    assert len(prefixes) == 3


def test_shards_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ArgumentValidation, match="3 shards cannot be divided among 2 nodes"):
        _meet(_Met(), num_shard=3)


def test_an_address_that_node_0_does_not_have_is_refused_at_once() -> None:
    config = LauncherConfig(nnodes=2, node_rank=0, master_addr="192.0.2.1")
    with pytest.raises(ArgumentValidation, match=r"`--master-addr` 192.0.2.1 .* this node has no such address"):
        group.open_group(config, Hardware(), Signals(), lambda seconds: None)


@pytest.mark.parametrize(
    ("found", "reason"), [(None, "has no address"), ("192.0.2.1", "is 192.0.2.1, not of this node")]
)
def test_a_name_is_resolved_until_it_is_of_node_0(
    monkeypatch: pytest.MonkeyPatch, found: str | None, reason: str
) -> None:
    answers = [found, found, "127.0.0.1"]
    monkeypatch.setattr(address, "resolve", lambda name: answers.pop(0))
    config = LauncherConfig(nnodes=2, node_rank=0, master_addr="leader.svc")
    assert group._leader_address(config, lambda seconds: None) == "127.0.0.1"
    answers.extend([found] * 3)
    monkeypatch.setattr(group.time, "monotonic", iter([0.0, 700.0]).__next__)
    with pytest.raises(ArgumentValidation, match=f"`--master-addr` leader.svc {reason}"):
        group._leader_address(config, lambda seconds: None)
