"""Which experts a token goes to, by which weights: all families' rules as data, and one router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.cpp import library as cpp
from model_server.layers.activation import sigmoid
from model_server.layers.linear.packed import PackedLinear

# DeepSeek V3's guard against a sum of zero.
TINY = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """From router logits to `top_k` of `num_experts` experts and their weights."""

    num_experts: int
    top_k: int
    # Softmax over all; sigmoid of each; or sparse mixer (Phi 3.5 MoE): one after another, each weighted by a softmax
    # over those within `jitter`.
    score: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    jitter: float = 0.01
    num_groups: int = 1
    top_groups: int = 1
    # Of a group; only the best `top_groups` of `num_groups` are open.
    group_score: Literal["max", "best_two"] = "max"
    # The p of the norm that divides the weights, plus `guard`; None: no norm.
    norm: float | None = None
    guard: float = TINY
    # On the final weights.
    scaling: float = 1.0
    # Weights multiply what experts read, not what they give.
    on_input: bool = False
    # The router's product is float32.
    wide: bool = False


Choice = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits [n, num_experts] -> weights [n, top_k] float32 and the experts they belong to, [n, top_k] int64."""


class RouterLinear:
    """A `Linear` of few outputs that choose: router logits, weights of an indexer."""

    __slots__ = ("_bias", "_is_wide", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, is_wide: bool) -> None:
        self._is_wide = is_wide  # in float32
        self._weight = weight.float() if is_wide else weight
        self._bias = bias.float() if is_wide and bias is not None else bias
        # torch's own product gives a row other bits alone than beside others, and an expert may hang on them.
        packs = cpp.usable(weight.device, self._weight.dtype) and weight.shape[1] % 2 == 0
        self._packed = PackedLinear(self._weight, self._bias) if packs else None

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float() if self._is_wide else x
        return F.linear(x, self._weight, self._bias) if self._packed is None else self._packed(x)

    def wide(self, x: Tensor) -> Tensor:
        return self(x).float()


class Router:
    """The `choice` by the logits of `linear`."""

    __slots__ = ("_choice", "_linear")

    def __init__(self, linear: Callable[[Tensor], Tensor], choice: Choice) -> None:
        self._linear = linear
        self._choice = choice

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._choice(self._linear(hidden))


def choose(logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose in plain torch, by every rule.

    Args:
        correction: [num_experts] float32, added to choosing scores, not to weights.
    """
    logits = logits.float()
    if routing.score == "sparse_mixer":
        return _sparse_mixer(logits, routing.top_k, routing.jitter)
    scores = logits.softmax(dim=-1) if routing.score == "softmax" else sigmoid(logits)
    # A sigmoid of a large logit is 1, whatever the logit: without a correction the logits themselves decide.
    choice = logits if correction is None else scores + correction
    if routing.top_groups < routing.num_groups:
        choice = _within_groups(scores if correction is None else choice, routing)
    chosen = choice.topk(routing.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, chosen)
    if routing.norm is not None:
        weights = weights / torch.linalg.vector_norm(weights, ord=routing.norm, dim=-1, keepdim=True).add_(
            routing.guard
        )
    if routing.scaling != 1.0:
        weights = weights * routing.scaling
    return weights, chosen


def _within_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Set scores outside of the best groups to -inf."""
    grouped = scores.view(-1, routing.num_groups, routing.num_experts // routing.num_groups)
    best = grouped.amax(dim=-1) if routing.group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)
    groups = best.topk(routing.top_groups, dim=-1, sorted=False).indices
    closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, groups, False)
    return grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).view_as(scores)


def _sparse_mixer(logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Choose as SparseMixer-v2 at inference (arXiv 2409.12136), the best of the rest each time."""
    weights, chosen = [], []
    left = logits
    for _ in range(top_k):
        best, index = left.max(dim=-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(dim=-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)
