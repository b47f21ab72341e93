"""One rank alone, and the words when ranks do not meet. Real collectives: tests/parity/test_tensor_parallel.py."""

from __future__ import annotations

import socket

import pytest
import torch

from model_server.distributed import ProcessGroup, connect
from model_server.errors import StartupError

CPU = torch.device("cpu")


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
    with pytest.raises(StartupError, match=rf"rank 0 of 2 did not meet the others at 127.0.0.1:{port} within 0.5 s"):
        connect(0, 2, CPU, port=port, timeout_s=0.5)
