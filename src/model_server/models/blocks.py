"""One layer: how attention and MLP are joined to the residual stream.

Their results are summands of this rank; `reduce` sums them over the ranks, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_server.layers.norm import Norm
from model_server.models.parts import AttentionPart, Mlp, Step

Reduce = Callable[[Tensor], Tensor]


class Block(Protocol):
    """One layer of any kind."""

    @property
    def attention(self) -> AttentionPart: ...

    def __call__(self, hidden: Tensor, step: Step, kept_rows: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden] -> the same; with `kept_rows` [num_rows] int64 only those tokens go on."""


@dataclass(frozen=True, slots=True)
class SequentialBlock:
    """x += attention(norm(x)); x += mlp(norm(x)). Any norm may be missing; a post norm is taken of what is added."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    attention_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    multiplier: float  # on what is added

    def __call__(self, hidden: Tensor, step: Step, kept_rows: Tensor | None = None) -> Tensor:
        """See `Block`."""
        attended = self.attention(hidden if self.attention_norm is None else self.attention_norm(hidden), step)
        if kept_rows is not None:
            attended, hidden = attended.index_select(0, kept_rows), hidden.index_select(0, kept_rows)
        added = self.reduce(self.attention.output(attended))
        if self.attention_post_norm is not None:
            added = self.attention_post_norm(added)
        hidden = added.add_(hidden) if self.multiplier == 1.0 else torch.add(hidden, added, alpha=self.multiplier)
        added = self.reduce(self.mlp(hidden if self.mlp_norm is None else self.mlp_norm(hidden)))
        if self.mlp_post_norm is not None:
            added = self.mlp_post_norm(added)
        return added.add_(hidden) if self.multiplier == 1.0 else torch.add(hidden, added, alpha=self.multiplier)


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """x += attention(norm(x)) + mlp(norm(x)): both halves read the same x, with one sum over the ranks."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    norm: Norm | None
    mlp_norm: Norm | None  # None: the MLP reads what the attention reads

    def __call__(self, hidden: Tensor, step: Step, kept_rows: Tensor | None = None) -> Tensor:
        """See `Block`."""
        normed = hidden if self.norm is None else self.norm(hidden)
        attended = self.attention(normed, step)
        if kept_rows is not None:
            attended, hidden, normed = (t.index_select(0, kept_rows) for t in (attended, hidden, normed))
        added = self.attention.output(attended).add_(
            self.mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden))
        )
        return self.reduce(added).add_(hidden)


@dataclass(frozen=True, slots=True)
class PostNormBlock:
    """x = norm(x + attention(x)); x = norm(x + mlp(x))."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    attention_norm: Norm | None
    mlp_norm: Norm | None

    def __call__(self, hidden: Tensor, step: Step, kept_rows: Tensor | None = None) -> Tensor:
        """See `Block`."""
        attended = self.attention(hidden, step)
        if kept_rows is not None:
            attended, hidden = attended.index_select(0, kept_rows), hidden.index_select(0, kept_rows)
        hidden = self.reduce(self.attention.output(attended)).add_(hidden)
        if self.attention_norm is not None:
            hidden = self.attention_norm(hidden)
        hidden = self.reduce(self.mlp(hidden)).add_(hidden)
        return hidden if self.mlp_norm is None else self.mlp_norm(hidden)
