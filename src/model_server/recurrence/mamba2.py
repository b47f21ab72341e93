"""Mamba-2 between its products, in plain torch: convolution, steps in time, the recurrence, gates, a norm.

With state S [state_size, head_dim], input x, step in time d > 0, rate a < 0, and B and C of the head's group:
S <- e^(a d) S + B^T (d x); output C S + skip * x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.recurrence.rows import by_segments, convolve_kept
from model_server.recurrence.segments import Segments
from model_server.recurrence.states import LayerStates, StateShape

# Tokens that are computed together.
CHUNK = 64


# norm(outputs * silu(gates)), norm(outputs) * silu(gates), or no norm.
NormPlace = Literal["behind gates", "before gates"]


@dataclass(frozen=True, slots=True)
class Gating:
    """What follows the recurrence: gates, and perhaps a norm over groups of the outputs, in float32."""

    eps: float
    place: NormPlace | None = None
    norm: Tensor | None = None  # [outputs]; None: there is none
    groups: int = 1  # of this norm

    def __call__(self, values: Tensor, gates: Tensor) -> Tensor:
        """Gate outputs, which may be overwritten."""
        gates = F.silu(gates.float())
        if self.norm is None:
            return values.mul_(gates)
        if self.place == "before gates":
            return self._normed(values).mul_(gates)
        return self._normed(values.mul_(gates))

    def _normed(self, values: Tensor) -> Tensor:
        assert self.norm is not None
        groups = values.view(len(values), self.groups, -1)
        return F.rms_norm(groups, groups.shape[2:], None, self.eps).view_as(values).mul_(self.norm)


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """A layer's small tensors, of this rank's heads, in float32."""

    heads: int
    head_dim: int
    # Of which there are B and C here.
    groups: int
    state_size: int
    # Head h is in group (first + h) // heads_per_group.
    first: int
    heads_per_group: int
    convolution: Tensor  # [width, channels]: x, B, C
    convolution_bias: Tensor | None  # [channels]
    rate: Tensor  # [heads], below 0
    bias: Tensor  # [heads], of the steps in time
    skip: Tensor  # [heads]
    # Least and largest step in time.
    limits: tuple[float, float]
    # None: the caller's, as the norm is over several ranks.
    gating: Gating | None

    @property
    def values(self) -> int:
        """Return the numbers of a token's inputs and outputs."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return the numbers of a token that the convolution reads."""
        return self.values + 2 * self.groups * self.state_size

    def state_shape(self, dtype: torch.dtype) -> StateShape:
        """Return what a request's slot holds, with inputs of the type."""
        kept = len(self.convolution) - 1, self.channels
        return StateShape(kept, dtype, (self.heads, self.state_size, self.head_dim))


class Tokens(NamedTuple):
    """What the recurrence reads of each token, float32."""

    query: Tensor  # [tokens, heads, state_size]: C
    key: Tensor  # the same: B
    value: Tensor  # [tokens, heads, head_dim]: d x
    decay: Tensor  # [tokens, heads]: a d

    def part(self, rows: slice) -> Tokens:
        return Tokens._make(t[rows] for t in self)

    def select(self, rows: Tensor) -> Tokens:
        return Tokens._make(t.index_select(0, rows) for t in self)


class TorchMamba2:
    """A `Mamba2Net`."""

    def __init__(self, weights: Mamba2Weights) -> None:
        self._weights = weights
        heads = torch.arange(weights.heads, device=weights.rate.device)
        self._group_of = (weights.first + heads) // weights.heads_per_group

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        weights, count = self._weights, len(projected)
        gates, mixed, times = torch.split(projected, [weights.values, weights.channels, weights.heads], dim=1)
        mixed = F.silu(convolve_kept(mixed, weights.convolution, weights.convolution_bias, segments, states.inputs))
        size = weights.groups * weights.state_size
        values, keys, queries = torch.split(mixed, [weights.values, size, size], dim=1)
        values = values.reshape(count, weights.heads, weights.head_dim)
        key, query = (
            t.reshape(count, weights.groups, weights.state_size).index_select(1, self._group_of)
            for t in (keys, queries)
        )
        times = F.softplus(times.float() + weights.bias).clamp_(*weights.limits)
        tokens = Tokens(query, key, values * times.unsqueeze(-1), times * weights.rate)
        found = by_segments(tokens, tokens.value, segments, states.state, step, sequence)
        found = found.addcmul_(values, weights.skip.unsqueeze(-1)).flatten(1)
        return found if weights.gating is None else weights.gating(found, gates).to(projected.dtype)


def step(tokens: Tokens, state: Tensor) -> Tensor:
    """Advance several sequences by a token.

    Args:
        state: [tokens, heads, state_size, head_dim], overwritten.

    Returns:
        [tokens, heads, head_dim].
    """
    query, key, value, decay = tokens
    state.mul_(decay.exp()[..., None, None])
    state.addcmul_(key.unsqueeze(-1), value.unsqueeze(-2))
    return (query.unsqueeze(-2) @ state).squeeze(-2)


def sequence(tokens: Tokens, state: Tensor) -> Tensor:
    """Advance one sequence, in chunks.

    Args:
        state: [heads, state_size, head_dim], overwritten.

    Returns:
        [tokens, heads, head_dim].
    """
    outputs = torch.empty_like(tokens.value)
    for first in range(0, len(outputs), CHUNK):
        rows = slice(first, first + CHUNK)
        outputs[rows] = _chunk(tokens.part(rows), state).transpose(0, 1)
    return outputs


def _chunk(tokens: Tokens, state: Tensor) -> Tensor:
    """Compute [heads, tokens, head_dim]; no e^(sum of decays) exceeds 1."""
    query, key, value, decay = (t.transpose(0, 1) for t in tokens)
    total = decay.cumsum(-1)  # [heads, tokens]
    apart = total.unsqueeze(-1) - total.unsqueeze(-2)
    future = torch.ones(apart.shape[-2:], dtype=torch.bool, device=apart.device).triu(1)
    between = apart.masked_fill_(future, -torch.inf).exp_()  # [heads, tokens, tokens before]
    output = (query @ state).mul_(total.exp().unsqueeze(-1)).baddbmm_((query @ key.mT).mul_(between), value)
    last = total[:, -1:]
    rest = (last - total).exp_().unsqueeze(-1)
    state.mul_(last.exp().unsqueeze(-1)).baddbmm_((key * rest).mT, value)
    return output
