"""Times of a decode step on nodes of GPUs, from sizes and rates alone. Seconds, bytes, tokens."""

from __future__ import annotations

from dataclasses import dataclass

# Of the devices' memory: the rest holds activations, graphs and the runtime.
_MEMORY_SHARE = 0.94
# What the router spends on one call to one connection, and the sampled ids need on their way back.
ROUTER_CALL_S = 0.27e-3
BACK_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Llama 3.1 405B in bfloat16, unless said otherwise."""

    weight_bytes: float = 810e9
    kv_bytes: float = 126 * 8 * 128 * 2 * 2  # of a token
    num_layers: int = 126
    width: int = 16_384
    number_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Eight GPUs of 141 GB with NVLink, and a network card of 400 Gbit/s for each.

    bandwidth: that one GPU reached in a decode step. hops: latency of one message inside and between nodes. links:
    bytes per second of one GPU inside the node, and to another one.
    """

    num_gpus: int = 8
    memory_bytes: float = 141e9
    bandwidth: float = 4.3e12
    hops: tuple[float, float] = (8e-6, 15e-6)
    links: tuple[float, float] = (450e9, 50e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One model on `num_nodes` nodes: each a stage of a pipeline, or all of them one stage.

    rows: of a micro-batch. context: tokens that each of them has.
    """

    num_nodes: int = 1
    is_pipeline: bool = True
    rows: int = 64
    context: int = 1024
    model: Model = Model()
    node: Node = Node()

    @property
    def num_stages(self) -> int:
        return self.num_nodes if self.is_pipeline else 1

    @property
    def num_micro_batches(self) -> int:
        return 1 if self.num_stages == 1 else self.num_stages + 1

    @property
    def name(self) -> str:
        if self.num_nodes == 1:
            return "1"
        kind = f"PP={self.num_nodes}" if self.is_pipeline else f"TP={self.num_nodes * self.node.num_gpus}"
        return f"{self.num_nodes}, {kind}"

    @property
    def _stream_bytes(self) -> float:
        """Of the residual stream of a micro-batch."""
        return self.rows * self.model.width * self.model.number_bytes

    @property
    def stage_s(self) -> float:
        """Time of a stage for a step of one micro-batch: it reads its weights and the rows' KV, and its GPUs add up
        twice for each layer."""
        model, node = self.model, self.node
        gpus, layers = node.num_gpus, model.num_layers / self.num_stages
        read = model.weight_bytes + self.rows * self.context * model.kv_bytes
        inside = node.hops[0] + 2 * (gpus - 1) / gpus * self._stream_bytes / node.links[0]
        time_s = read / (self.num_nodes * gpus * node.bandwidth) + 2 * layers * inside
        if self.num_nodes > 1 and not self.is_pipeline:
            time_s += 2 * layers * (2 * node.hops[1] + 2 * self._stream_bytes / (gpus * node.links[1]))
        return time_s

    @property
    def hop_s(self) -> float:
        """The residual stream of a micro-batch from one stage to the next."""
        if self.num_stages == 1:
            return 0.0
        return self.node.hops[1] + self._stream_bytes / (self.node.num_gpus * self.node.links[1])

    @property
    def cycle_s(self) -> float:
        """Between two tokens of a request."""
        return max(
            self.num_micro_batches * self.stage_s, self.num_stages * self.stage_s + _hops(self) * self.hop_s + BACK_S
        )

    @property
    def efficiency(self) -> float:
        """The share of the time in which a stage works."""
        return self.num_micro_batches * self.stage_s / self.cycle_s

    @property
    def total_rows(self) -> int:
        return self.num_micro_batches * self.rows

    @property
    def tokens_per_s(self) -> float:
        return self.total_rows / self.cycle_s

    @property
    def kv_tokens(self) -> float:
        """That fit beside the weights."""
        memory = self.num_nodes * self.node.num_gpus * self.node.memory_bytes * _MEMORY_SHARE
        return max(memory - self.model.weight_bytes, 0.0) / self.model.kv_bytes

    def router_cores(self, connections: int) -> float:
        """That the router needs for calls to so many connections."""
        return self.num_micro_batches / self.cycle_s * connections * ROUTER_CALL_S


def _hops(group: Group) -> int:
    return max(group.num_stages - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Groups side by side behind a load balancer.

    node_fails_s: mean time between failures of a node. restart_s: until a group serves again after one. disk: bytes
    per second that each node reads from its own disk. volume: the same of one shared volume, for all nodes together.
    """

    num_nodes: int
    group: Group
    node_fails_s: float = 30 * 86_400.0
    restart_s: float = 300.0
    disk: float = 6e9
    volume: float = 5e9

    @property
    def num_groups(self) -> int:
        return self.num_nodes // self.group.num_nodes

    @property
    def tokens_per_s(self) -> float:
        return self.num_groups * self.group.tokens_per_s

    @property
    def away_share(self) -> float:
        """The share of the time in which one group is away."""
        return min(self.group.num_nodes * self.restart_s / self.node_fails_s, 1.0)

    @property
    def cold_starts_s(self) -> tuple[float, float]:
        """Until all weights are read: each node its own part from its disk, or all from one volume."""
        of_node = self.group.model.weight_bytes / self.group.num_nodes
        return of_node / self.disk, of_node * self.num_nodes / self.volume
