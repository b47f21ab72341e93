"""A leader and workers in one process: who joins, who is refused, and who is named when a node is lost."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from support.node_certificates import certificates

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation, LauncherError, NodeLost, ShardFailed
from launcher.nodes import group_end
from launcher.nodes.group_end import Failure
from launcher.nodes.leader import Leader
from launcher.nodes.member import Member
from launcher.nodes.node_group import NodeGroup
from launcher.nodes.worker import Worker
from wire.log.log_line import LogLine
from wire.node.v1 import node_pb2 as pb
from wire.rpc.mutual_tls import MutualTls

LIMIT_S = 60.0
VERSIONS = {"tercet": "1.0", "torch": "2.9"}


def hello(rank: int, nodes: int = 2, versions: dict[str, str] | None = None, num_gpus: int = 0) -> pb.Hello:
    return pb.Hello(
        node_rank=rank, num_nodes=nodes, address="127.0.0.1", versions=versions or VERSIONS, num_gpus=num_gpus
    )


def config_of(rank: int, **options: object) -> LauncherConfig:
    values = {"model_id": "demo", "nnodes": 2, "node_rank": rank, "group_token": "secret", "join_timeout": 30}
    return LauncherConfig(**(values | options))  # type: ignore[arg-type]


class Nodes:
    """Makes the nodes of one test and closes them."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            self.port = int(holder.getsockname()[1])
        self._made: list[NodeGroup] = []
        self._threads = ThreadPoolExecutor()

    def leader(self, said: pb.Hello | None = None, **options: object) -> Leader:
        return self._keep(Leader(config_of(0, **options), said or hello(0), self.port, lambda: 7, lambda: None))

    def worker(self, rank: int = 1, said: pb.Hello | None = None, **options: object) -> Worker:
        made = Worker(config_of(rank, **options), said or hello(rank), self.port, lambda: "127.0.0.1", lambda: None)
        return self._keep(made)

    def joining(self, node: NodeGroup, rank: int, commit: str = "", **options: object) -> Future[LauncherConfig]:
        config = config_of(rank, **options)
        return self._threads.submit(node.join, config, lambda _: commit, _pausing(node))

    def meeting(self, node: NodeGroup, said: pb.Prepared) -> Future[pb.Start]:
        return self._threads.submit(node.meet, said, _pausing(node))

    def _keep(self, node: NodeGroup) -> NodeGroup:
        self._made.append(node)
        return node

    def close(self) -> None:
        for node in reversed(self._made):
            node.close()
        self._threads.shutdown()


def _pausing(node: NodeGroup) -> Callable[[float], None]:
    def pause(_: float) -> None:
        time.sleep(0.01)
        node.check()

    return pause


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


@pytest.fixture
def pair(nodes: Nodes) -> tuple[Leader, Worker]:
    """Two nodes that have joined."""
    leader, worker = nodes.leader(), nodes.worker()
    for joined in (nodes.joining(leader, 0), nodes.joining(worker, 1)):
        joined.result(LIMIT_S)
    return leader, worker


def eventually(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def error_of(check: Callable[[], object]) -> LauncherError:
    """What `check` raises in the end."""
    caught: list[LauncherError] = []

    def raises() -> bool:
        try:
            check()
        except LauncherError as error:
            caught.append(error)
        return bool(caught)

    eventually(raises)
    return caught[0]


def test_all_nodes_get_the_commit_and_the_places_of_all(nodes: Nodes) -> None:
    leader, worker = nodes.leader(), nodes.worker()
    joined = [nodes.joining(leader, 0, "abc", lease_seconds=33), nodes.joining(worker, 1, model_id=None)]
    first, second = (future.result(LIMIT_S) for future in joined)
    assert (first.revision, second.revision, second.model_id, second.lease_seconds) == ("abc", "abc", "demo", 33)
    prepared = [pb.Prepared(endpoint=f"tcp://{rank}", digests={"config.json": "x"}, num_shard=2) for rank in range(2)]
    met = [nodes.meeting(leader, prepared[0]), nodes.meeting(worker, prepared[1])]
    start, same = (future.result(LIMIT_S) for future in met)
    assert start == same
    assert list(start.endpoints) == ["tcp://0", "tcp://1"]
    assert (start.store_address, start.store_port, len(start.nonce)) == ("127.0.0.1", 7, 16)


@pytest.mark.parametrize(
    ("said", "options", "reason"),
    [
        (hello(1, versions=VERSIONS | {"torch": "2.6"}), {},
         r"node 1 \(127.0.0.1\) has torch 2.6, node 0 \(127.0.0.1\) 2.9: install the same version"),
        (hello(1, nodes=3), {}, r"node 1 \(127.0.0.1\) has `--nnodes` 3, node 0 \(127.0.0.1\) 2"),
        (hello(2), {}, r"node 2 \(127.0.0.1\) is not one of the 2 nodes of node 0"),
        (hello(1, num_gpus=4), {}, r"has 4 GPUs, node 0 \(127.0.0.1\) 0"),
        (hello(1), {"group_token": "other"}, r"node 0 \(127.0.0.1\) does not take the `--group-token` of node 1"),
    ],
)  # fmt: skip
def test_a_node_that_does_not_fit_is_refused_in_one_sentence(
    nodes: Nodes, said: pb.Hello, options: dict[str, object], reason: str
) -> None:
    nodes.leader()
    worker = nodes.worker(1, said, **options)
    with pytest.raises(ArgumentValidation, match=reason):
        nodes.joining(worker, 1, **options).result(LIMIT_S)


def test_nodes_with_certificates_of_one_authority_join(nodes: Nodes, tmp_path: Path) -> None:
    ours, theirs = certificates(tmp_path / "ours"), certificates(tmp_path / "theirs")
    leader = nodes.leader(**_tls(ours), join_timeout=60)
    with pytest.raises(ArgumentValidation, match="did not reach node 0"):
        options = {"join_timeout": 1, **_tls(theirs)}
        nodes.joining(nodes.worker(1, **options), 1, **options).result(LIMIT_S)
    joined = [nodes.joining(leader, 0), nodes.joining(nodes.worker(1, **_tls(ours)), 1)]
    assert all(future.result(LIMIT_S).model_id == "demo" for future in joined)


def _tls(paths: MutualTls) -> dict[str, Path]:
    return {"group_tls_cert": paths.cert, "group_tls_key": paths.key, "group_tls_ca": paths.ca}


def test_a_rank_that_is_there_already_is_refused(nodes: Nodes, pair: tuple[Leader, Worker]) -> None:
    with pytest.raises(ArgumentValidation, match=r"has a node 1 already, at 127.0.0.1"):
        nodes.joining(nodes.worker(), 1).result(LIMIT_S)


def test_who_did_not_join_is_named(nodes: Nodes) -> None:
    leader = nodes.leader(hello(0, nodes=3), nnodes=3, join_timeout=1)
    with pytest.raises(ArgumentValidation, match=r"node 1 and node 2 did not join node 0 .* within 1 s"):
        nodes.joining(leader, 0, nnodes=3, join_timeout=1).result(LIMIT_S)


def test_without_a_leader_the_worker_says_what_to_look_at(nodes: Nodes) -> None:
    with pytest.raises(ArgumentValidation, match=r"did not reach node 0 at 127.0.0.1:\d+ within 1 s"):
        nodes.joining(nodes.worker(join_timeout=1), 1, join_timeout=1).result(LIMIT_S)


def test_no_lease_runs_before_node_0_is_reached(nodes: Nodes) -> None:
    options = {"join_timeout": 1, "lease_seconds": 2}
    worker = nodes.worker(1, **options)
    worker._stream.lease_s = 0.05
    with pytest.raises(ArgumentValidation, match="did not reach node 0"):
        nodes.joining(worker, 1, **options).result(LIMIT_S)


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (pb.Prepared(digests={"config.json": "y"}, num_shard=2), r"config.json of the model is not the same on node 0"),
        (pb.Prepared(digests={"config.json": "x"}, num_shard=4), r"with 2 shards, node 1 \(127.0.0.1\) with 4"),
    ],
)
def test_nodes_with_different_models_do_not_start(
    nodes: Nodes, pair: tuple[Leader, Worker], theirs: pb.Prepared, reason: str
) -> None:
    leader, worker = pair
    met = nodes.meeting(worker, theirs)
    with pytest.raises(ArgumentValidation, match=reason) as caught:
        nodes.meeting(leader, pb.Prepared(digests={"config.json": "x"}, num_shard=2)).result(LIMIT_S)
    leader.end(caught.value)
    with pytest.raises(NodeLost, match=reason):
        met.result(LIMIT_S)


def test_a_failure_of_the_worker_is_named_on_both(pair: tuple[Leader, Worker]) -> None:
    leader, worker = pair
    own = ShardFailed("shard 1 was killed")
    ended: list[LauncherError] = []
    thread = threading.Thread(target=lambda: ended.append(worker.end(own)))
    thread.start()
    lost = error_of(leader.check)
    assert isinstance(lost, NodeLost)
    seen = leader.end(lost)
    thread.join(LIMIT_S)
    assert str(seen) == str(ended[0]) == "node 1 (127.0.0.1): shard 1 was killed"
    assert (seen.exit_status, ended[0].exit_status) == (7, 1)


def test_a_consequence_on_the_leader_gives_way_to_its_cause(pair: tuple[Leader, Worker]) -> None:
    leader, worker = pair
    mine = ShardFailed("shard 0 lost rank 1")
    mine.is_consequence = True
    leader.report(mine)
    worker.report(ShardFailed("shard 1 was killed"))
    assert str(leader.end(mine)) == "node 1 (127.0.0.1): shard 1 was killed"
    assert str(error_of(worker.check)) == "node 1 (127.0.0.1): shard 1 was killed"


def test_a_leader_that_fails_is_named_on_the_worker(pair: tuple[Leader, Worker]) -> None:
    leader, worker = pair
    assert str(leader.end(ShardFailed("shard 0 was killed"))) == "node 0 (127.0.0.1): shard 0 was killed"
    assert str(error_of(worker.check)) == "node 0 (127.0.0.1): shard 0 was killed"


def test_a_closed_connection_is_a_lost_node(pair: tuple[Leader, Worker]) -> None:
    leader, worker = pair
    worker.close()
    assert str(error_of(leader.check)).startswith("node 1 (127.0.0.1) is gone: ")


def test_a_broken_connection_is_a_lost_node() -> None:
    """gRPC's error at a server's end has no code."""

    def messages() -> Iterator[pb.NodeSays]:
        yield pb.NodeSays(serving=pb.Serving())
        raise grpc.RpcError

    member, changes = Member(hello(1), 30.0), []
    member.read(messages(), member.on_message, lambda: changes.append(member.is_closed.is_set()))
    assert changes == [False, True] and member.code is None
    assert member.loss() == Failure(node_rank=1, text=group_end.gone("node 1 (127.0.0.1)"))


def test_a_node_that_is_silent_for_the_lease_is_lost(pair: tuple[Leader, Worker]) -> None:
    leader, worker = pair
    leader._others()[0].lease_s = 0.0
    assert "node 1 (127.0.0.1) has not been heard from for 0 s" in str(error_of(leader.check))
    worker._stream.lease_s = 0.0
    assert "node 0 (127.0.0.1) has not been heard from for 0 s" in str(error_of(worker.check))


def test_a_worker_that_is_asked_to_stop_waits_for_the_leader(pair: tuple[Leader, Worker]) -> None:
    leader, worker = pair
    assert not leader.wants_stop()
    assert not worker.may_stop_shards()
    eventually(leader.wants_stop)
    assert not worker.wants_stop()
    assert leader.may_stop_shards()
    eventually(worker.wants_stop)
    assert worker.may_stop_shards()
    leader.close()
    worker.check()


def test_the_leader_waits_for_the_shards_of_all(pair: tuple[Leader, Worker]) -> None:
    leader, worker = pair
    assert not leader.all_are_ready()
    assert worker.all_are_ready()
    eventually(leader.all_are_ready)


def test_warnings_of_a_worker_are_in_the_log_of_the_leader(
    pair: tuple[Leader, Worker], caplog: pytest.LogCaptureFixture
) -> None:
    line = LogLine(level="WARN", message="a slow disk", target="model_server", rank=3)
    child = logging.getLogger("text_generation_launcher.shard")
    child.warning("%s", line.message, extra={"log_line": line})

    def repeated() -> list[logging.LogRecord]:
        return [record for record in caplog.records if getattr(record, "node", None) == 1]

    eventually(repeated)
    (record,) = repeated()
    assert (record.getMessage(), record.levelname, record.rank) == ("a slow disk", "WARNING", 3)  # type: ignore[attr-defined]
