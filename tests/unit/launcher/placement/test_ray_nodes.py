"""What `--placement ray` asks of a cluster and makes of its answers, with a stand-in for Ray's module."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation, NodeFailed, NodeLost
from wire.exit_status import LOST_NODE


class RayError(Exception):
    pass


class FakeRay(ModuleType):
    """A cluster of some nodes; this process is on the first."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.cluster: list[dict[str, Any]] = []
        self.refusal: Exception | None = None
        self.util = ModuleType("ray.util")
        self.util.get_node_ip_address = lambda: "10.0.0.1"  # type: ignore[attr-defined]
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.RayError = RayError  # type: ignore[attr-defined]

    def add(self, *, alive: bool = True, **resources: float) -> None:
        own = {f"node:10.0.0.{len(self.cluster) + 1}": 1.0}
        self.cluster.append({"Alive": alive, "Resources": resources | own})

    def nodes(self) -> list[dict[str, Any]]:
        return self.cluster

    def init(self, **_: object) -> None:
        if self.refusal is not None:
            raise self.refusal


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    groups, strategies = ModuleType("ray.util.placement_group"), ModuleType("ray.util.scheduling_strategies")
    groups.placement_group = groups.remove_placement_group = None  # type: ignore[attr-defined]
    strategies.PlacementGroupSchedulingStrategy = None  # type: ignore[attr-defined]
    for module in (fake, fake.util, fake.exceptions, groups, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake


@pytest.fixture
def ray_nodes(fake: FakeRay) -> Iterator[Any]:
    name = "launcher.placement.ray_nodes"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    # The next import is one of Ray itself.
    del sys.modules[name], sys.modules["launcher.placement"].ray_nodes  # type: ignore[attr-defined]


def config(**options: object) -> LauncherConfig:
    return LauncherConfig(**({"model_id": "demo", "placement": "ray", "nnodes": 2} | options))  # type: ignore[arg-type]


def test_a_node_gives_the_gpus_of_its_shards(fake: FakeRay, ray_nodes: Any) -> None:
    for _ in range(2):
        fake.add(CPU=16, GPU=8)
    assert ray_nodes._bundle(config(num_stage=2, num_shard=4)) == {"CPU": 1, "GPU": 4}
    assert ray_nodes._bundle(config()) == {"CPU": 1, "GPU": 8}, "as many as each of the nodes has"


def test_a_cluster_without_gpus_gives_a_cpu(fake: FakeRay, ray_nodes: Any) -> None:
    for _ in range(2):
        fake.add(CPU=1)
    assert ray_nodes._bundle(config(num_shard=2)) == {"CPU": 1}


def test_too_few_nodes_are_counted(fake: FakeRay, ray_nodes: Any) -> None:
    fake.add(CPU=16, GPU=8)
    fake.add(CPU=16, GPU=2)
    fake.add(CPU=16, GPU=8, alive=False)
    expected = "`--nnodes` 2 needs 2 Ray nodes with 1 CPU and 8 GPU each, but the cluster has 1 of 2 nodes"
    with pytest.raises(ArgumentValidation, match=expected):
        ray_nodes._bundle(config(num_shard=16))


def test_node_0_is_here_if_this_machine_has_what_a_node_needs(fake: FakeRay, ray_nodes: Any) -> None:
    fake.add(CPU=4)
    fake.add(CPU=4, GPU=8)
    assert ray_nodes._own_node({"CPU": 1}) == {"node:10.0.0.1": 0.001}
    assert ray_nodes._own_node({"CPU": 1, "GPU": 8}) == {}


def test_a_launcher_gets_its_place_and_what_was_asked(ray_nodes: Any) -> None:
    nodes = [ray_nodes._Node(rank, None, f"10.0.0.{rank + 1}") for rank in range(2)]
    asked = config(port=8123, num_stage=2, group_token="secret")
    leader, other = (ray_nodes._words(asked, node, ["10.0.0.1", "10.0.0.2"]) for node in nodes)
    assert {"--model-id", "demo", "--port", "--num-stage"} <= set(leader)
    assert "--port" not in other and other[other.index("--node-rank") + 1] == "1"
    assert other[other.index("--master-addr") + 1] == "10.0.0.1"
    assert "secret" not in leader and "--placement" not in leader


@pytest.mark.parametrize(
    ("first", "second", "kind", "words"),
    [
        ({"status": LOST_NODE, "last_error": "Error: node 1"}, {"status": 1, "last_error": "Error: full"}, NodeFailed,
         r"node 1 \(b\) .*; Error: full"),
        ({"status": LOST_NODE, "last_error": "Error: x"}, {"lost": "the actor died"}, NodeLost,
         r"node 1 \(b\) is lost: the actor died"),
        ({"status": 1}, {"status": LOST_NODE}, NodeFailed, r"node 0 \(a\) .*; see its log"),
    ],
)  # fmt: skip
def test_the_node_that_failed_first_is_named(
    ray_nodes: Any, first: dict[str, Any], second: dict[str, Any], kind: type[Exception], words: str
) -> None:
    nodes = [ray_nodes._Node(0, None, "a", **first), ray_nodes._Node(1, None, "b", **second)]
    failed = min(nodes, key=ray_nodes._is_consequence)
    error = ray_nodes._failure(failed)
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error


@pytest.mark.parametrize("where", ["", "10.0.0.1", "ray://10.0.0.1:10001", "10.0.0.1:x"])
def test_the_address_of_the_cluster_is_asked_for(ray_nodes: Any, where: str) -> None:
    with pytest.raises(ArgumentValidation, match="needs the variable RAY_ADDRESS"):
        ray_nodes._connect({"RAY_ADDRESS": where})


def test_a_cluster_that_is_not_there_is_one_line(ray_nodes: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        where = f"127.0.0.1:{holder.getsockname()[1]}"
    with pytest.raises(ArgumentValidation, match=f"no Ray cluster at {where}"):
        ray_nodes._connect({"RAY_ADDRESS": where})


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (RuntimeError("AuthTokenError: wrong\nmore"), "refuses the token: set RAY_AUTH_MODE=token"),
        (ConnectionError("another version\nmore"), "cannot be joined: another version$"),
    ],
)
def test_a_cluster_that_refuses(fake: FakeRay, ray_nodes: Any, raised: Exception, words: str) -> None:
    fake.refusal = raised
    with (
        socket.create_server(("127.0.0.1", 0)) as cluster,
        pytest.raises(ArgumentValidation, match=words),
    ):
        ray_nodes._connect({"RAY_ADDRESS": f"127.0.0.1:{cluster.getsockname()[1]}"})
