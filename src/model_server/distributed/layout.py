"""The place of one rank in each dimension, and its groups."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from model_server.distributed.group import ProcessGroup

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Axis:
    """A rank's place in one dimension."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """World ranks count through a stage's ranks, then the stages; consecutive ones fill a node."""

    # Among the ranks that divide the weights of the same layers.
    tensor: Axis = Axis()
    # Of the pipeline, whose stages hold consecutive layers.
    stage: Axis = Axis()
    # Of the machines, each with equally many ranks.
    node: Axis = Axis()
    # Layers of each stage; None: as equal as possible.
    layer_counts: tuple[int, ...] | None = None

    @classmethod
    def of(cls, rank: int, world_size: int, *, num_stages: int = 1, num_nodes: int = 1) -> Layout:
        """Place world rank `rank`; `world_size` is a multiple of `num_stages` and `num_nodes`."""
        per_stage, per_node = world_size // num_stages, world_size // num_nodes
        return cls(
            tensor=Axis(rank % per_stage, per_stage),
            stage=Axis(rank // per_stage, num_stages),
            node=Axis(rank // per_node, num_nodes),
        )

    @property
    def world(self) -> Axis:
        """Among all ranks."""
        return Axis(self.stage.rank * self.tensor.size + self.tensor.rank, self.stage.size * self.tensor.size)

    @property
    def local(self) -> Axis:
        """Return the place among this node's ranks, which share its devices and CPUs."""
        per_node = self.world.size // self.node.size
        return Axis(self.world.rank % per_node, per_node)

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank samples and answers."""
        return self.stage.rank == self.stage.size - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this rank's stage."""
        rank, size = self.stage.rank, self.stage.size
        if self.layer_counts is not None:
            first = sum(self.layer_counts[:rank])
            return range(first, first + self.layer_counts[rank])
        return range(rank * num_layers // size, (rank + 1) * num_layers // size)

    def owns(self, request_id: int) -> bool:
        """Whether this rank answers for a request: the last stage's ranks take turns."""
        return self.has_last_stage and request_id % self.tensor.size == self.tensor.rank


@dataclass(frozen=True, slots=True)
class Ranks:
    """The groups of one rank."""

    layout: Layout
    # All ranks, for agreement and lost ranks.
    world: ProcessGroup
    # Those that divide the weights of the same layers.
    tensor: ProcessGroup
    # This rank and the one with its share of the stage before (`after`: behind); alone without one.
    before: ProcessGroup = field(default_factory=ProcessGroup)
    after: ProcessGroup = field(default_factory=ProcessGroup)

    @classmethod
    def of(cls, world: ProcessGroup, layout: Layout | None = None, device: torch.device = _CPU) -> Ranks:
        """Divide `world` into stages with tensors on `device`; all ranks call it together."""
        if layout is None or layout.stage.size == 1:
            return cls(layout or Layout.of(world.rank, world.size), world, world)
        width, stages = layout.tensor.size, layout.stage.size
        tensor = world.part([list(range(s * width, (s + 1) * width)) for s in range(stages)])
        boundaries = [
            world.part([[s * width + r, (s + 1) * width + r] for r in range(width)]) for s in range(stages - 1)
        ]
        before = boundaries[layout.stage.rank - 1] if layout.stage.rank > 0 else ProcessGroup()
        after = ProcessGroup() if layout.has_last_stage else boundaries[layout.stage.rank]
        ranks = cls(layout, world, tensor, before, after)
        ranks._use_boundaries(device)
        return ranks

    def _use_boundaries(self, device: torch.device) -> None:
        """Send a message over each: NCCL connects two ranks at their first, which would be within a step."""
        message = torch.ones(1, 1, device=device)
        if not self.layout.has_last_stage:
            self.after.send(message, 1)
        if self.layout.stage.rank > 0:
            self.before.receive(torch.empty_like(message), 0)
