"""One rank alone, the words when ranks do not meet, and real ranks over gloo: their sums and the end of one of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model_server.distributed.group import MOST_SENDING, ProcessGroup, connect
from model_server.errors import FatalError, MissingPeerError, StartupError
from wire.exit_status import LOST_PEER

CPU = torch.device("cpu")

# A rank that says READY when it has met the others and leaves as `python -m model_server` does.
_RANK = """
import sys, time
import torch
from model_server.distributed.group import connect
from model_server.errors import LostPeerError
from model_server.distributed.peer_watch import leave_at_once
from wire.exit_status import LOST_PEER
rank, size, port = map(int, sys.argv[1:4])
torch.set_num_threads(1)
group = connect(rank, size, torch.device("cpu"), port=port)
def ready():
    print("READY", flush=True)
def main():
    {body}
try:
    main()
    group.close()
except LostPeerError as error:
    group.close()
    print(error, flush=True)
    leave_at_once(LOST_PEER)
"""

Ranks = Callable[[int, str], list["subprocess.Popen[str]"]]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Starts the ranks of one group, each running a few lines."""
    started: list[subprocess.Popen[str]] = []

    def start(size: int, body: str) -> list[subprocess.Popen[str]]:
        program = _RANK.replace("{body}", body.replace("\n", "\n    "))
        for rank in range(size):
            argv = [sys.executable, "-c", program, str(rank), str(size), str(port)]
            started.append(
                subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
            )
        return started

    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_one_rank_is_a_no_op() -> None:
    group = connect(0, 1, CPU, port=1)
    tensor = torch.randn(3)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather_last(tensor) is tensor
    assert group.all_reduce_min(7) == 7
    group.barrier()
    group.close()
    group.close()
    assert type(group) is ProcessGroup


def test_rank_out_of_range() -> None:
    with pytest.raises(StartupError, match="rank 2 is not below the number of shards 2"):
        connect(2, 2, CPU)


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(StartupError) as caught:
            connect(0, 2, CPU, port=port)
    text = (
        f"cannot listen on 127.0.0.1:{port} for the other shards: Address already in use; choose another --master-port"
    )
    assert str(caught.value) == text


def test_nobody_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    with pytest.raises(
        StartupError, match=rf"rank 0 of 2 did not connect to the others at 127.0.0.1:{port} within 0.5 s"
    ):
        connect(0, 2, CPU, port=port, timeout_s=0.5)


def _wait_for_listener(port: int) -> None:
    """The store's own waiting grows longer from try to try."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


@pytest.mark.long
def test_who_did_not_come_is_named(ranks: Ranks) -> None:
    """Two of three: the one that listens and another one."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    program = _RANK.replace("port=port)", "port=port, timeout_s=8)").replace("{body}", "ready()")
    argv = [sys.executable, "-c", program.replace("LostPeerError", "StartupError"), "0", "3", str(port)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(argv, env=environ, **pipe) as first, pytest.raises(MissingPeerError) as caught:
        try:
            _wait_for_listener(port)
            connect(1, 3, CPU, port=port, timeout_s=200)
        finally:
            said, _ = first.communicate(timeout=100)
    assert "rank 0 of 3 did not connect to the others" in said and "within 8 s: rank 2 did not connect" in said, said
    assert "rank 1 of 3 did not connect to the others" in str(caught.value)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    with pytest.raises(
        MissingPeerError, match=r"rank 1 of 2 did not connect .*: rank 0, which listens there, did not connect"
    ):
        connect(1, 2, CPU, port=port, timeout_s=1)


@pytest.mark.long
def test_a_process_with_another_key_prefix_meets_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    program = _RANK.replace("port=port)", "port=port, timeout_s=8, key_prefix='ours/')").replace("{body}", "ready()")
    argv = [sys.executable, "-c", program.replace("LostPeerError", "StartupError"), "0", "2", str(port)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(argv, env=environ, **pipe) as first, pytest.raises(MissingPeerError) as caught:
        try:
            _wait_for_listener(port)
            connect(1, 2, CPU, port=port, timeout_s=4, key_prefix="theirs/")
        finally:
            said, _ = first.communicate(timeout=100)
    assert "within 8 s: rank 1 did not connect" in said, said
    assert "rank 0 did not connect" in str(caught.value)


def test_ranks_agree_and_get_what_was_sent_before(ranks: Ranks) -> None:
    """A message arrives though its sender has gone on, and keeps nothing of it, before the receiver asks."""
    body = """
group.on_lost(lambda message: None)
if rank == 1:
    group.send(torch.arange(3), 0)
group.barrier()
if rank == 0:
    message = torch.zeros(3, dtype=torch.int64)
    group.receive(message, 1)
    assert message.tolist() == [0, 1, 2]
assert not group.any_of(False)
assert group.any_of(rank == 1)
group.barrier()
assert not group.any_of(False)
try:
    if rank == 0:
        group.any_of(True, 1.0)
    else:
        time.sleep(3)
except FatalError as error:
    print(error, flush=True)
ready()
"""
    first, second = ranks(2, "from model_server.errors import FatalError\n" + body)
    said, _ = first.communicate(timeout=120)
    assert "rank 0 left a step that the others are still in" in said, said
    assert first.returncode == 0
    assert second.communicate(timeout=120)[0].endswith("READY\n")


@pytest.mark.long
def test_collectives_of_four_ranks(ranks: Ranks) -> None:
    body = """
group.on_lost(lambda message: None)  # the ranks end one by one
def gathered(part):
    return torch.cat([part + 10 * r for r in range(4)], -1)
own = torch.arange(6.0).view(1, 2, 3)
x = own + 10 * rank
for view in (lambda t: t, lambda t: t[0, 0], lambda t: t.transpose(1, 2)):
    assert torch.equal(group.all_gather_last(view(x)), gathered(view(own)))
    wide = group.all_gather_last(view(x).bfloat16(), torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide, gathered(view(own)))
    out = torch.empty_like(wide)
    assert group.all_gather_last(view(x), out=out) is out and torch.equal(out, wide)
assert torch.equal(group.all_reduce(x.clone()), 4 * own + 60)
assert group.all_reduce_min(7 - rank) == 4
group.barrier()
print("GOOD", flush=True)
"""
    for process in ranks(4, body):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and "GOOD" in output, output


@pytest.mark.parametrize(
    ("size", "body"),
    [
        (2, "ready()\nwhile True: group.all_reduce(torch.ones(8))"),
        pytest.param(4, "ready()\nif rank < 2: time.sleep(600)\ngroup.barrier()", marks=pytest.mark.long),
    ],
    ids=["in-collectives", "some-load-and-some-wait"],
)
def test_a_rank_that_is_killed_takes_the_others_with_it(ranks: Ranks, size: int, body: str) -> None:
    """Far below the time-out of 120 s, also for ranks that no collective tells; each names the lost one."""
    started = ranks(size, body)
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "READY\n"
    started[1].send_signal(signal.SIGKILL)
    for rank, process in enumerate(started):
        output, _ = process.communicate(timeout=90)
        if rank == 1:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode == LOST_PEER, output
            # With others that have left because of it, if they were quicker than the look at who is gone.
            assert re.search(rf"rank {rank} lost rank .*\b1\b", output), output


def test_a_rank_that_failed_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    group = connect(0, 1, CPU, force=True)
    farewells: list[str] = []
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: farewells.append("bye"))
    try:
        group.close(orderly=False)
        assert farewells == []
        group.close()
        assert farewells == ["bye"]
    finally:
        destroy()


def test_what_fails_in_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of the backend are fatal; this rank's own device or memory speak for themselves."""
    group = connect(0, 1, CPU, force=True)
    try:
        raised: Exception

        def fail(*_: object, **__: object) -> None:
            raise raised

        monkeypatch.setattr(dist, "all_reduce", fail)
        for raised in (torch.OutOfMemoryError("full"), RuntimeError("CUDA error: device-side assert triggered")):
            with pytest.raises(type(raised), match=str(raised)):
                group.all_reduce(torch.ones(2))
        for raised in (RuntimeError("Connection closed by peer\nmore"), dist.DistBackendError("NCCL error\nmore")):
            with pytest.raises(FatalError, match=rf"^rank 0 cannot reach the others: {str(raised).splitlines()[0]}$"):
                group.all_reduce(torch.ones(2))
    finally:
        group.close()
        dist.destroy_process_group()


def test_one_rank_can_be_made_a_real_group() -> None:
    group = connect(0, 1, CPU, force=True)
    try:
        assert type(group) is not ProcessGroup and dist.is_initialized()
        tensor = torch.arange(6.0).view(2, 3)
        assert torch.equal(group.all_reduce(tensor.clone()), tensor)
        assert torch.equal(group.all_gather_last(tensor), tensor)
        out = torch.empty(2, 3)
        assert group.all_gather_last(tensor.bfloat16(), torch.float32, out) is out and torch.equal(out, tensor)
        assert group.all_reduce_min(3) == 3
    finally:
        group.close()
        group.close()
    assert not dist.is_initialized()


class StartedWork:
    """Torch's object for a message under way."""

    def __init__(self, number: int, waits: list[int]) -> None:
        self.number, self.waits = number, waits

    def wait(self) -> None:
        self.waits.append(self.number)


def test_what_is_sent_is_only_queued_and_held_until_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sends on a stream of its own, and waiting puts later work behind it; gloo drops what nobody holds."""
    group = connect(0, 1, CPU, force=True)
    works: list[weakref.ref[StartedWork]] = []
    tensors: list[weakref.ref[torch.Tensor]] = []
    waits: list[int] = []

    def isend(tensor: torch.Tensor, to: int, group: object) -> StartedWork:
        work = StartedWork(len(works), waits)
        works.append(weakref.ref(work))
        tensors.append(weakref.ref(tensor))
        return work

    try:
        monkeypatch.setattr(dist, "isend", isend)
        for _ in range(MOST_SENDING):
            group.send(torch.ones(2, 4), 0)
        assert waits == [] and all(one() is not None for one in [*works, *tensors])
        group.send(torch.ones(2, 4), 0)
        assert waits == [0]
        assert [one() is None for one in works] == [one() is None for one in tensors] == [True] + [False] * MOST_SENDING
    finally:
        group.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_part_of_a_group_on_a_device_is_connected_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """NCCL would make its communicator at the first call, which may be in a capture."""
    group = connect(0, 1, CPU, force=True)
    calls: list[str] = []
    for name in ("all_reduce", "all_gather_last"):

        def noting(self: ProcessGroup, tensor: torch.Tensor, name: str = name) -> torch.Tensor:
            calls.append(name)
            return tensor

        monkeypatch.setattr(type(group), name, noting)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(dist, "new_group", lambda members, timeout: None)
    monkeypatch.setattr(type(group), "barrier", lambda self: None)
    try:
        if on_device:
            group.use_device(CPU, one_shot=False)  # type: ignore[attr-defined]
        calls.clear()
        part = group.part([[0, 1], [2, 3]])
        assert part.size == 2
        assert calls == (["all_reduce", "all_gather_last", "synchronize"] if on_device else [])
    finally:
        group.close()
