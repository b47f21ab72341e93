"""What the hardware allows: the least time of a step, and with it what every measured figure is a share of.

Pure arithmetic, no torch. A step reads every weight once (or multiplies by it, whichever takes longer) and then the KV
cache of its rows: `max(W / BW, 2 P b / R) + b c kappa / BW`. For experts W counts those that a batch is expected to
hit when every token chooses its own at random: `E (1 - (1 - k / E)^b)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_server.models.decoder.moe import Moe
from model_server.models.decoder.spec import Spec

# Rows of the largest batch that the throughput roofline assumes.
MOST_ROWS = 512


@dataclass(frozen=True, slots=True)
class Machine:
    """Ceilings that S0 measured. bandwidth: bytes/s, read and written; flops: of a large bfloat16 product, 1/s; gap_s:
    what one more kernel costs inside a CUDA graph; memory: bytes of the device."""

    bandwidth: float
    flops: float
    gap_s: float
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a model costs, in numbers (not bytes) unless said otherwise. Of all layers together: `shared` weights that
    every token meets, `per_expert` weights of one expert. Embedding rows are not read as a matrix; the head is."""

    shared: int
    head: int
    embedding: int  # 0 if the head is the same memory
    query_width: int  # heads * head_dim
    layers: int
    kv_bytes: int  # per token, of all layers
    per_expert: int = 0
    experts: int = 0
    top_k: int = 0
    weight_bytes: int = 2  # of one number

    @property
    def total_bytes(self) -> int:
        """All weights in memory."""
        return (self.shared + self.per_expert * self.experts + self.head + self.embedding) * self.weight_bytes

    @property
    def active_layers(self) -> int:
        """Weights of the layers that one token meets."""
        return self.shared + self.per_expert * self.top_k

    @property
    def active(self) -> int:
        """The same and the head."""
        return self.active_layers + self.head

    def read_bytes(self, batch: int) -> float:
        """Weights that a decode step of `batch` rows reads."""
        hit = 0.0
        if self.experts:
            hit = self.experts * (1 - (1 - self.top_k / self.experts) ** batch)
        return (self.shared + self.head + hit * self.per_expert) * self.weight_bytes


def cost_of(spec: Spec, weight_bytes: int = 2) -> Cost:
    """The cost of a decoder whose attention is described by the fields of its Spec; norms and biases are left out.

    Raises ValueError for latent attention and for MLPs of an unknown kind.
    """
    if spec.attention is not None:
        raise ValueError("a model with latent attention has no roofline here")
    width = spec.num_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    shared = spec.num_layers * spec.hidden_size * (2 * width + 2 * kv_width)
    per_expert = experts = top_k = 0
    for index in range(spec.num_layers):
        plan = spec.mlps[index] if spec.mlps else None
        if plan is None:
            shared += (3 if spec.gated else 2) * spec.hidden_size * spec.intermediate_size
        elif isinstance(plan, Moe):
            experts, top_k = plan.routing.num_experts, plan.routing.top_k
            per_expert += 3 * spec.hidden_size * plan.intermediate_size
            shared += spec.hidden_size * experts + 3 * spec.hidden_size * plan.shared_size
        else:
            raise ValueError(f"no roofline for an MLP of kind {type(plan).__name__}")
    vocabulary = spec.vocab_size * (spec.hidden_size if spec.embedding_size is None else spec.embedding_size)
    return Cost(
        shared=shared, head=vocabulary, embedding=0 if spec.tied_head else vocabulary, query_width=width,
        layers=spec.num_layers, kv_bytes=2 * spec.num_layers * kv_width * weight_bytes, per_expert=per_expert,
        experts=experts, top_k=top_k, weight_bytes=weight_bytes,
    )  # fmt: skip


def attention_seconds(cost: Cost, machine: Machine, batch: int, context: float) -> float:
    """The time that decode attention of all layers takes to read `batch` rows of `context` tokens."""
    return batch * context * cost.kv_bytes / machine.bandwidth


def matrix_seconds(cost: Cost, machine: Machine, batch: int) -> float:
    """The time of all products of a decode step: weights streamed, or multiplied."""
    return max(cost.read_bytes(batch) / machine.bandwidth, 2 * cost.active * batch / machine.flops)


def step_seconds(cost: Cost, machine: Machine, batch: int, context: float) -> float:
    """The least time of one decode step of `batch` rows with `context` tokens each."""
    return matrix_seconds(cost, machine, batch) + attention_seconds(cost, machine, batch, context)


def prefill_flops_per_token(cost: Cost, length: int) -> float:
    """Operations per token of a prompt of `length` (causal: half of the square); the head, for one token, left out."""
    return 2 * cost.active_layers + 2 * length * cost.query_width * cost.layers


def prefill_seconds(cost: Cost, machine: Machine, lengths: list[int]) -> float:
    """The least time of prompts of these lengths in one forward."""
    return sum(n * prefill_flops_per_token(cost, n) for n in lengths) / machine.flops


def prefill_attention_flops(num_heads: int, head_dim: int, length: int) -> float:
    """Operations of one layer's causal attention over a prompt: two products, half of the square."""
    return 2.0 * length * length * num_heads * head_dim


def kv_tokens(cost: Cost, machine: Machine, fraction: float, workspace: float = 2e9) -> int:
    """Tokens whose keys and values fit beside the weights."""
    return max(0, int((fraction * machine.memory - cost.total_bytes - workspace) / cost.kv_bytes))


def offline_tokens_per_second(cost: Cost, machine: Machine, prompt: int, output: int, capacity: int) -> float:
    """Output tokens/s of endless requests, each with its prefill on its own.

    Rows are at all stages of their output, so that they take half of it on average: as many run as fit `capacity`
    tokens like that, at most MOST_ROWS.
    """
    length = prompt + output / 2
    rows = max(1, min(MOST_ROWS, int(capacity // length)))
    per_token = step_seconds(cost, machine, rows, length) / rows
    return output / (prefill_seconds(cost, machine, [prompt]) + output * per_token)
