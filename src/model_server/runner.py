"""The one interface behind which every way of running a model stands.

The engine hands over a flattened batch and gets logits; it never sees which family or which runner it talks to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.kv_cache import KvCache, KvShape


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One flattened forward. `logit_rows` picks the token rows whose logits are wanted, in order; None means all."""

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    logit_rows: Tensor | None  # [num_rows] int64


class Runner(Protocol):
    """A loaded model on this rank."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits, which may exceed the tokenizer's vocabulary."""

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the positions allow; None if unbounded."""

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """Per layer, what one token's K and V take on this rank."""

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Write the step's K/V into `cache` and return logits [num_rows, vocab_size] float32, equal on every rank."""
