"""Where a rank stands in each dimension."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.stage_mailboxes import Mailboxes, wires

from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Axis, Layout, Ranks


def test_one_stage_on_one_node_divides_all_weights() -> None:
    layout = Layout.of(2, 4)
    assert layout.tensor == layout.world == layout.local == Axis(2, 4)
    assert layout.stage == layout.node == Axis(0, 1)
    assert layout.has_last_stage
    assert layout.layers(7) == range(7)
    assert [layout.owns(request) for request in range(5)] == [False, False, True, False, False]
    assert Layout() == Layout.of(0, 1)


@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_every_rank_has_a_place_of_its_own(world_size: int, num_stages: int, num_nodes: int) -> None:
    layouts = [Layout.of(r, world_size, num_stages=num_stages, num_nodes=num_nodes) for r in range(world_size)]
    assert [layout.world for layout in layouts] == [Axis(r, world_size) for r in range(world_size)]
    assert len({(layout.stage.rank, layout.tensor.rank) for layout in layouts}) == world_size
    assert len({(layout.node.rank, layout.local.rank) for layout in layouts}) == world_size
    for request in range(world_size):
        assert sum(layout.owns(request) for layout in layouts) == 1


def test_stages_hold_all_layers_in_order() -> None:
    stages = [Layout.of(r, 3, num_stages=3).layers(7) for r in range(3)]
    assert [index for layers in stages for index in layers] == list(range(7))
    assert all(stages)


def test_every_boundary_is_used_once_before_the_first_step() -> None:
    """Three stages of two ranks, each on a thread; no rank waits for one that waits for it."""
    parts: dict[tuple[int, ...], object] = {}
    sent: list[tuple[int, ...]] = []

    class World(ProcessGroup):
        size = 6

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def part(self, members: list[list[int]]) -> ProcessGroup:
            mine = next((one for one in members if self.rank in one), [self.rank])
            return Noting(mine, mine.index(self.rank))

    class Noting(Mailboxes):
        def __init__(self, members: list[int], rank: int) -> None:
            self.members = tuple(members)
            super().__init__(rank, len(members), parts.setdefault(self.members, wires(len(members))))  # type: ignore[arg-type]

        def send(self, tensor: torch.Tensor, to: int) -> None:
            sent.append(self.members)
            super().send(tensor, to)

    with ThreadPoolExecutor(6) as pool:
        made = [pool.submit(Ranks.of, World(rank), Layout.of(rank, 6, num_stages=3)) for rank in range(6)]
        ranks = [one.result(60) for one in made]
    assert sorted(sent) == [(0, 2), (1, 3), (2, 4), (3, 5)]
    assert [one.tensor.size for one in ranks] == [2] * 6
