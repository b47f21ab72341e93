"""The one interface of every way to compute hidden states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from model_server.pooling.batch import FlatBatch


class PooledModel(Protocol):
    """A loaded model on this rank."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def typed(self) -> bool:
        """Whether token types tell a pair's texts apart."""

    @property
    def max_positions(self) -> int | None:
        """Return the longest text, if positions are bounded."""

    @property
    def weight_bytes(self) -> int | None: ...

    def set_longest(self, longest: int) -> None:
        """Bound the texts' tokens."""

    def hidden(self, batch: FlatBatch) -> Tensor:
        """Return the last hidden states [num_tokens, hidden], each text as if alone."""
