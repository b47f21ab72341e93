"""The connections between stages of one process: messages go through queues."""

from __future__ import annotations

import queue

import torch
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Layout, Ranks
from model_server.distributed.stage_links import StageLinks

Wires = dict[tuple[int, int], "queue.SimpleQueue[Tensor]"]


class Mailboxes(ProcessGroup):
    """Messages between the ranks of one group, in the order of each pair. Read when they are received: what is written
    to a tensor after it was sent shows."""

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        self.rank, self.size, self._wires = rank, size, wires

    def send(self, tensor: Tensor, to: int) -> None:
        self._wires[self.rank, to].put(tensor)

    def receive(self, tensor: Tensor, source: int) -> None:
        message = self._wires[source, self.rank].get(timeout=60)
        assert message.shape == tensor.shape and message.dtype == tensor.dtype
        tensor.copy_(message)


def wires(size: int) -> Wires:
    return {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}


def stage_links(num_stages: int) -> list[StageLinks]:
    """Of all stages, each with one rank."""
    world, boundaries = wires(num_stages), [wires(2) for _ in range(num_stages - 1)]
    return [
        StageLinks(
            Ranks(
                Layout.of(rank, num_stages, num_stages=num_stages),
                Mailboxes(rank, num_stages, world),
                ProcessGroup(),
                before=Mailboxes(1, 2, boundaries[rank - 1]) if rank else ProcessGroup(),
                after=Mailboxes(0, 2, boundaries[rank]) if rank < num_stages - 1 else ProcessGroup(),
            ),
            torch.device("cpu"),
        )
        for rank in range(num_stages)
    ]
