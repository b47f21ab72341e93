"""One layer: how attention and MLP are added to the residual stream.

Results are partial sums, which `reduce` sums over the ranks, and are added with the next norm, perhaps the next layer's
(`AddNorm.add`): blocks hand on the stream beside what is still to be added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_server.layers.norm import AddNorm
from model_server.models.decoder.parts import AttentionPart, Mlp, Step
from model_server.models.decoder.spec import StreamFactors

Reduce = Callable[[Tensor], Tensor]
# [n, hidden], and of the same shape what is still to be added to it, a tensor that is read nowhere else; None: nothing.
Stream = tuple[Tensor, Tensor | None]


def residual_norm(norm: AddNorm | None, hidden: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a stream's sum, and its norm, if there is one."""
    if added is None:
        return hidden, hidden if norm is None else norm(hidden)
    if norm is not None:
        return norm.add(hidden, added)
    # Perhaps the stream is wider than what is added.
    total = added.add_(hidden) if added.dtype == hidden.dtype else hidden + added
    return total, total


class Block(Protocol):
    """One layer of any kind."""

    @property
    def attention(self) -> AttentionPart: ...

    @property
    def mlp(self) -> Mlp: ...

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        """Advance the stream [num_tokens, hidden], from attention on with `kept_rows` alone."""


@dataclass(frozen=True, slots=True)
class SequentialBlock:
    """x += attention(norm(x)); x += mlp(norm(x)). Norms are optional; post norms are of what is added."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    attention_norm: AddNorm | None
    attention_post_norm: AddNorm | None
    mlp_norm: AddNorm | None
    mlp_post_norm: AddNorm | None
    multiplier: float  # on what is added
    mlp_reduce: Reduce | None = None  # None: `reduce`

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        hidden, normed = residual_norm(self.attention_norm, hidden, added)
        attended = self.attention(normed, step)
        if kept_rows is not None:
            attended, hidden = attended.index_select(0, kept_rows), hidden.index_select(0, kept_rows)
        hidden, added = self._add(self.reduce(self.attention.output(attended)), hidden, self.attention_post_norm)
        hidden, normed = residual_norm(self.mlp_norm, hidden, added)
        reduce = self.mlp_reduce or self.reduce
        return self._add(reduce(self.mlp(normed, step)), hidden, self.mlp_post_norm)

    def _add(self, added: Tensor, hidden: Tensor, post_norm: AddNorm | None) -> Stream:
        if post_norm is not None:
            added = post_norm(added)
        return (hidden, added) if self.multiplier == 1.0 else (torch.add(hidden, added, alpha=self.multiplier), None)


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """x += attention(norm(x)) + mlp(norm(x)), with one sum over the ranks."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    norm: AddNorm | None
    mlp_norm: AddNorm | None  # None: the MLP reads what the attention reads

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        hidden, normed = residual_norm(self.norm, hidden, added)
        attended = self.attention(normed, step)
        if kept_rows is not None:
            attended, hidden, normed = (t.index_select(0, kept_rows) for t in (attended, hidden, normed))
        read = normed if self.mlp_norm is None else self.mlp_norm(hidden)
        partial_sum = self.attention.output(attended).add_(self.mlp(read, step))
        return hidden, self.reduce(partial_sum)


@dataclass(frozen=True, slots=True)
class SingleBlock:
    """x += attention(norm(x)), or x += mlp(norm(x)): it has one of both."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    norm: AddNorm | None
    has_mlp: bool

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        hidden, found = residual_norm(self.norm, hidden, added)
        if not self.has_mlp:
            found = self.attention(found, step)
        if kept_rows is not None:
            hidden, found = hidden.index_select(0, kept_rows), found.index_select(0, kept_rows)
        return hidden, self.reduce(self.mlp(found, step) if self.has_mlp else self.attention.output(found))


@dataclass(frozen=True, slots=True)
class PostNormBlock:
    """x = norm(x + attention(x)); x = norm(x + mlp(x))."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    attention_norm: AddNorm | None
    mlp_norm: AddNorm | None

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        _, hidden = residual_norm(None, hidden, added)
        attended = self.attention(hidden, step)
        if kept_rows is not None:
            attended, hidden = attended.index_select(0, kept_rows), hidden.index_select(0, kept_rows)
        _, hidden = residual_norm(self.attention_norm, hidden, self.reduce(self.attention.output(attended)))
        _, hidden = residual_norm(self.mlp_norm, hidden, self.reduce(self.mlp(hidden, step)))
        return hidden, None


@dataclass(frozen=True, slots=True)
class NormedBlock:
    """x = a norm(x) + b attention(norm(x)); x = c norm(x) + d mlp(norm(x))."""

    attention: AttentionPart
    mlp: Mlp
    reduce: Reduce
    attention_norm: AddNorm
    mlp_norm: AddNorm
    factors: StreamFactors

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        _, normed = residual_norm(self.attention_norm, hidden, added)
        attended = self.attention(normed, step)
        if kept_rows is not None:
            attended, normed = attended.index_select(0, kept_rows), normed.index_select(0, kept_rows)
        found = self.reduce(self.attention.output(attended))
        normed = self.mlp_norm(_weighed(normed, found, self.factors.attention))
        return _weighed(normed, self.reduce(self.mlp(normed, step)), self.factors.mlp), None


def _weighed(normed: Tensor, added: Tensor, factors: tuple[float, float]) -> Tensor:
    """Sum both, each times its factor; `added` is overwritten."""
    of_normed, of_added = factors
    return (added if of_added == 1.0 else added.mul_(of_added)).add_(normed, alpha=of_normed)
