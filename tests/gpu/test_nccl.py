"""NCCL on one card: a real communicator of one rank, eagerly and inside a captured graph. Run it alone: the process
group is the process's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from model_server.distributed.group import ProcessGroup, connect

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    group = connect(0, 1, device, force=True)
    yield group
    group.close()
    assert not dist.is_initialized()


def test_collectives(group: ProcessGroup) -> None:
    tensor = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(group.all_reduce(tensor.clone()), tensor)
    assert torch.equal(group.all_gather_last(tensor), tensor)
    assert group.all_reduce_min(7) == 7
    group.barrier()


def test_in_a_captured_graph(group: ProcessGroup) -> None:
    """Replays see new values; collectives outside the graph may come between them."""
    static = torch.zeros(4, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        return group.all_gather_last(group.all_reduce(static * 2))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    for _ in range(100):
        static.normal_()
        graph.replay()
        assert torch.equal(result, static * 2)
        assert torch.equal(group.all_reduce(static.clone()), static)
