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
        """Whether it has token types, which tell the texts of a pair apart."""

    @property
    def max_positions(self) -> int | None:
        """The longest text that its positions allow; None: they are unbounded."""

    @property
    def weight_bytes(self) -> int | None: ...

    def set_longest(self, longest: int) -> None:
        """No text will be longer than that many tokens."""

    def hidden(self, batch: FlatBatch) -> Tensor:
        """The last layer's hidden states [num_tokens, hidden], of every text as if it were alone."""
