"""One layer: how attention and MLP are joined to the residual stream.

Their results are summands of this rank; `reduce` sums them over the ranks, in their memory or new. What a half gives is
not added at once, but together with the norm that reads the sum, which may be the next layer's (`AddNorm.add`): blocks
hand on the stream beside what is still to be added to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_server.layers.norm import AddNorm
from model_server.models.decoder.parts import AttentionPart, Mlp, Step

Reduce = Callable[[Tensor], Tensor]
# [n, hidden], and of the same shape what is still to be added to it, a tensor that nobody else reads; None: nothing.
Stream = tuple[Tensor, Tensor | None]


def join(norm: AddNorm | None, hidden: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of a stream, and the norm of that sum: itself, if there is no norm."""
    if added is None:
        return hidden, hidden if norm is None else norm(hidden)
    if norm is not None:
        return norm.add(hidden, added)
    added.add_(hidden)
    return added, added


class Block(Protocol):
    """One layer of any kind."""

    @property
    def attention(self) -> AttentionPart: ...

    @property
    def mlp(self) -> Mlp: ...

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        """From stream to stream of [num_tokens, hidden]; with `kept_rows` [num_rows] int64 only those tokens go on."""


@dataclass(frozen=True, slots=True)
class SequentialBlock:
    """x += attention(norm(x)); x += mlp(norm(x)). Any norm may be missing; a post norm is taken of what is added."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    attention_norm: AddNorm | None
    attention_post_norm: AddNorm | None
    mlp_norm: AddNorm | None
    mlp_post_norm: AddNorm | None
    multiplier: float  # on what is added

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        """See `Block`."""
        hidden, normed = join(self.attention_norm, hidden, added)
        attended = self.attention(normed, step)
        if kept_rows is not None:
            attended, hidden = attended.index_select(0, kept_rows), hidden.index_select(0, kept_rows)
        hidden, added = self._half(self.attention.output(attended), hidden, self.attention_post_norm)
        hidden, normed = join(self.mlp_norm, hidden, added)
        return self._half(self.mlp(normed), hidden, self.mlp_post_norm)

    def _half(self, summand: Tensor, hidden: Tensor, post_norm: AddNorm | None) -> Stream:
        added = self.reduce(summand)
        if post_norm is not None:
            added = post_norm(added)
        return (hidden, added) if self.multiplier == 1.0 else (torch.add(hidden, added, alpha=self.multiplier), None)


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """x += attention(norm(x)) + mlp(norm(x)): both halves read the same x, with one sum over the ranks."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    norm: AddNorm | None
    mlp_norm: AddNorm | None  # None: the MLP reads what the attention reads

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        """See `Block`."""
        hidden, normed = join(self.norm, hidden, added)
        attended = self.attention(normed, step)
        if kept_rows is not None:
            attended, hidden, normed = (t.index_select(0, kept_rows) for t in (attended, hidden, normed))
        summand = self.attention.output(attended).add_(
            self.mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden))
        )
        return hidden, self.reduce(summand)


@dataclass(frozen=True, slots=True)
class PostNormBlock:
    """x = norm(x + attention(x)); x = norm(x + mlp(x))."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    attention_norm: AddNorm | None
    mlp_norm: AddNorm | None

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        """See `Block`."""
        _, hidden = join(None, hidden, added)
        attended = self.attention(hidden, step)
        if kept_rows is not None:
            attended, hidden = attended.index_select(0, kept_rows), hidden.index_select(0, kept_rows)
        _, hidden = join(self.attention_norm, hidden, self.reduce(self.attention.output(attended)))
        _, hidden = join(self.mlp_norm, hidden, self.reduce(self.mlp(hidden)))
        return hidden, None
