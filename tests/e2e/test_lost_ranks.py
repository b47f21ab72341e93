"""Several ranks: whichever is lost, and however, the others end within seconds and every request gets one answer."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from support.launched import (
    AT_IMPORT,
    NOTICED_S,
    Stream,
    ended,
    port_is_free,
    sabotaged,
    served,
    socket_folder,
    streams,
    wait_for,
)  # fmt: skip
from support.running_server import RunningServer, running_server

pytestmark = pytest.mark.e2e

# Read by the interpreter of every shard as it starts: rank 1 fails in its next collective once the file is there.
_FAILING_RANK = """
import os
if os.environ.get("RANK") == "1" and os.environ.get("WORLD_SIZE"):
    import torch
    import torch.distributed as dist
    real = dist.all_reduce
    def all_reduce(*args, **kwargs):
        if os.path.exists({flag!r}):
            raise {error}
        return real(*args, **kwargs)
    dist.all_reduce = all_reduce
"""


def assert_failed(running: list[Stream]) -> None:
    """Every stream has ended, after its tokens, with one error."""
    for stream in running:
        assert stream.ended.wait(NOTICED_S), "a stream hangs"
        assert not stream.is_complete
        assert stream.status == 200 and "error" in stream.events[-1]
        assert sum("error" in event for event in stream.events) == 1
        said = str(stream.events[-1]["error"])  # neither a path nor an address
        assert "the model server" in said or "no step finished" in said
        assert "/" not in said and "127.0.0.1" not in said


def children(server: RunningServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        pytest.param(2, 0, marks=pytest.mark.long),
        pytest.param(2, 1, marks=pytest.mark.weekly),
        pytest.param(4, 2, marks=pytest.mark.long),
    ],
)
def test_one_is_killed_in_a_step(size: int, rank: int) -> None:
    with served("--num-shard", str(size)) as (server, family):
        assert len(family.shards) == size
        folder = socket_folder(family)
        running = streams(server, 3)
        family.shards[rank].send_signal(signal.SIGKILL)
        assert_failed(running)
        assert ended(server) == 1
        assert family.left() == []
        # A survivor may be asked to stop before it has said what it has lost (test_peer_watch.py has its words).
        assert f'Error: ShardFailed("shard {rank} was killed by signal 9' in server.log()
        assert not folder.exists()
        assert port_is_free(server.port)


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "count"),
    [("importing torch", 2), ("Server started at", 1)],
    ids=["before-they-meet", "when-one-is-up"],
)
def test_one_is_killed_while_they_start(text: str, count: int) -> None:
    with running_server("demo", "--num-shard", "2", wait=False) as server:
        wait_for(server, text, count)
        family = children(server)
        [victim] = [p for p in family if "model_server" in p.cmdline() and p.environ().get("RANK") == "1"]
        victim.send_signal(signal.SIGKILL)
        assert ended(server) == 1
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        assert "shard 1 was killed by signal 9" in server.log().rstrip().splitlines()[-1], server.log()


@pytest.mark.long
def test_one_does_not_come(tmp_path: Path) -> None:
    """The other one gives up, names it, and what it does instead is shown."""
    environ = sabotaged(tmp_path, AT_IMPORT.format(action="time.sleep(600)", condition='== "1"'))
    with running_server("demo", "--num-shard", "2", environ=environ | {"TGI_DIST_TIMEOUT": "3"}, wait=False) as server:
        assert ended(server, 120) == 1
        log = server.log()
        last = log.rstrip().splitlines()[-1]
        assert last.startswith('Error: ShardCannotStart("shard 0 exited with status 6: rank 0 of 2 did not connect'), (
            log
        )
        assert "within 3 s: rank 1 did not connect" in last
        assert "Stacks of shard 1 (importing for " in log and "in find_spec" in log


@pytest.mark.long
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.weekly), 4])
def test_ranks_that_are_stopped_in_order_do_not_miss_each_other(size: int) -> None:
    with served("--num-shard", str(size)) as (server, family):
        running = streams(server, 1, 20)
        assert server.stop() == 0
        assert running[0].ended.wait(NOTICED_S) and running[0].is_complete
        assert family.left() == []
        assert " lost rank " not in server.log() and "ERROR" not in server.log(), server.log()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.weekly)])
def test_one_makes_no_progress(rank: int) -> None:
    with served("--num-shard", "2", MAX_STEP_SECONDS="2") as (server, family):
        running = streams(server, 2)
        family.shards[rank].send_signal(signal.SIGSTOP)
        assert_failed(running)
        assert not server.is_healthy()
        assert ended(server) == 1
        assert family.left() == []
        assert "no step finished for 2 s" in server.log().splitlines()[-1]


@pytest.mark.parametrize(
    "error",
    [
        pytest.param("torch.OutOfMemoryError('no room')", marks=pytest.mark.long),
        pytest.param("MemoryError('no room')", marks=pytest.mark.weekly),
    ],
    ids=["device-memory", "host-memory"],
)
def test_one_fails_in_a_step(tmp_path: Path, error: str) -> None:
    """The others are inside a collective that it will never join: it ends, and is the one that is named."""
    flag = tmp_path / "fail"
    environ = sabotaged(tmp_path, _FAILING_RANK.format(flag=str(flag), error=error))
    with served("--num-shard", "2", **environ) as (server, family):
        running = streams(server, 2)
        flag.touch()
        assert_failed(running)
        assert ended(server) == 1
        assert family.left() == []
        last = server.log().rstrip().splitlines()[-1]
        assert last.startswith('Error: ShardFailed("shard 1 exited with status 1: '), server.log()
        assert "out of memory in one step; lower --max-batch-prefill-tokens" in last
