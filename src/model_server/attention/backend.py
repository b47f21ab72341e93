"""What an attention backend is. Which one is used: `attention.choice`.

A backend turns the step's metadata into a plan once per forward (`begin`) and answers one `attend` per layer. It reads
K and V from the paged cache, where the model has already written those of this step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """Biases of scores by distance: slope * (key position - query position), one slope per query head of this rank.

    bfloat16_scale: None, or Falcon's arithmetic: slope * key position is rounded to bfloat16, then multiplied by this.
    """

    slopes: Tensor  # [num_heads] float32
    bfloat16_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionLayer:
    """The constants of one layer's attention on this rank.

    A query at position p sees the keys at positions in (p - window, p]; window None: all up to p. This is
    transformers' rule (a token and the window - 1 before it); TGI shows one token more.
    With `chunk`, positions are cut into runs of that many, and a query sees those of its own run up to itself.

    Score of a query and a key: softcap * tanh(scale * q k / softcap), without softcap scale * q k; then ALiBi is added.
    A sink is one more score of its head in the softmax, which takes its share of the weight and gives nothing.

    key_scale, value_scale: what the numbers in the cache are multiplied by to give keys and values; 1 but for caches of
    float8. No number is: the former goes into the scale of the scores, the latter onto the result.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    alibi: Alibi | None = None
    sinks: Tensor | None = None  # [num_heads] float32
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def stored_scale(self) -> float:
        """`scale` for keys as they are stored."""
        return self.scale * self.key_scale


class AttentionStep(Protocol):
    """One forward, planned."""

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of all tokens of the step, already written to the cache.

        query: [num_tokens, num_heads, head_dim]; key: [num_tokens, num_kv_heads, head_dim] and value:
        [num_tokens, num_kv_heads, value_dim], the step's own. Returns [num_tokens, num_heads * value_dim] in the dtype
        of the query. Query head h reads KV head h // (num_heads // num_kv_heads).
        """


class AttentionBackend(Protocol):
    """A way to compute attention over the paged cache, whose rows are in the query's type or in float8."""

    @property
    def name(self) -> str:
        """Our word for it, as in `--attention`."""

    @property
    def tgi_name(self) -> str:
        """The word for `Info.attention_impl`, one that TGI's clients know."""

    @property
    def block_size(self) -> int:
        """Tokens per cache block that suit this backend."""

    @property
    def capturable(self) -> bool:
        """A decode step may be recorded as a CUDA graph: nothing in it follows from the host's lengths but bounds."""

    @property
    def sees_ahead(self) -> bool:
        """It serves steps with `last_keys`; others are for the reference."""

    def begin(self, metadata: AttentionMetadata, cache: KvCache) -> AttentionStep:
        """Plan one forward. Costs no device synchronisation."""
