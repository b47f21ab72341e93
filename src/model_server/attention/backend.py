"""What an attention backend is: it plans a forward once from the step's metadata, then attends layer by layer.

K and V are read from the paged cache, where the model has written the step's own already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """Biases slope * (key position - query position), a slope for each query head of this rank."""

    slopes: Tensor  # [num_heads] float32
    # Falcon's arithmetic: slope * key position rounded to bfloat16, times this; None: exact.
    bfloat16_scale: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DistanceBias:
    """Biases that a table has for how far back a key is, as T5 learns them."""

    # [num_heads, n] float32, for each query head of this rank; keys at n - 1 and farther have the last one.
    table: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLayer:
    """The constants of one layer's attention on this rank.

    Score: softcap * tanh(scale * q k / softcap), or scale * q k, plus a bias. A sink is one more score in the
    softmax, without a value.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    scale: float
    # A query at position p sees keys in (p - window, p], as in transformers (TGI shows one more); None: all up to p.
    window: int | None = None
    # Positions are cut into runs of this length, and a query sees its own run up to itself.
    chunk: int | None = None
    softcap: float | None = None
    alibi: Alibi | None = None
    distance_bias: DistanceBias | None = None
    sinks: Tensor | None = None  # [num_heads] float32
    # Multiplies cached keys (as `value_scale` values), 1 but for float8; applied to the scores and to the result
    # instead.
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def stored_scale(self) -> float:
        """`scale` for keys as they are stored."""
        return self.scale * self.key_scale


class AttentionStep(Protocol):
    """One forward, planned."""

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend for all tokens of the step, whose keys are already in the cache.

        Query head h reads KV head h // (num_heads // num_kv_heads).

        Args:
            query: [num_tokens, num_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim], the step's own.
            value: [num_tokens, num_kv_heads, value_dim], the step's own.

        Returns:
            [num_tokens, num_heads * value_dim] in the query's type.
        """


class AttentionBackend(Protocol):
    """Computes attention over the paged cache, in the query's type or float8."""

    @property
    def name(self) -> str:
        """Our word for it, as in `--attention`."""

    @property
    def tgi_name(self) -> str:
        """Return the word for `Info.attention_impl`."""

    @property
    def block_size(self) -> int:
        """Return the tokens per block that suit it."""

    @property
    def capturable(self) -> bool:
        """Whether decode steps fit CUDA graphs: only bounds come from the host's lengths."""

    @property
    def sees_ahead(self) -> bool:
        """Whether it serves steps with `last_keys`."""

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> AttentionStep:
        """Plan one forward. Costs no device synchronisation."""
