"""Mamba-1's two halves between products, in plain torch: a convolution, and the recurrence with its gates.

With state S [state_size, channels], inputs x, steps in time d > 0 of all channels, rates a < 0, and B and C:
S <- e^(a d) S + B^T (d x); output (C S + skip * x) * silu(gates).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.recurrence.rows import by_segments, convolve_kept
from model_server.recurrence.segments import Segments
from model_server.recurrence.states import LayerStates, StateShape

# Tokens that are computed together, each with a state.
CHUNK = 32


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """A convolution whose newest inputs are kept of each request, of this rank's channels, in float32."""

    weight: Tensor  # [width, channels]
    bias: Tensor | None  # [channels]
    # Of projected rows, which begin with the channels.
    row_width: int


@dataclass(frozen=True, slots=True)
class Mamba1Weights:
    """The recurrence's small tensors, of this rank's channels, in float32."""

    rate: Tensor  # [state_size, channels], below 0
    bias: Tensor  # [channels], of the steps in time
    skip: Tensor  # [channels]

    @property
    def state_size(self) -> int:
        return len(self.rate)

    @property
    def channels(self) -> int:
        return len(self.skip)

    def state_shape(self, width: int, dtype: torch.dtype) -> StateShape:
        """Return what a request's slot holds, with inputs of the type.

        Args:
            width: Tokens that the convolution reads.
        """
        return StateShape((width - 1, self.channels), dtype, (1, self.state_size, self.channels))


class Tokens(NamedTuple):
    """What the recurrence reads of each token, float32."""

    query: Tensor  # [tokens, state_size]: C
    key: Tensor  # the same: B
    value: Tensor  # [tokens, channels]: d x
    time: Tensor  # the same: d
    rate: Tensor  # [state_size, channels], of all tokens

    def part(self, rows: slice) -> Tokens:
        return Tokens._make((*(t[rows] for t in self[:-1]), self.rate))

    def select(self, rows: Tensor) -> Tokens:
        return Tokens._make((*(t.index_select(0, rows) for t in self[:-1]), self.rate))

    def decay(self) -> Tensor:
        """Return e^(a d), [tokens, state_size, channels]."""
        return (self.time.unsqueeze(1) * self.rate).exp_()


class TorchKeptConvolution:
    """A `Mamba1Half` that reads and updates kept inputs alone."""

    def __init__(self, weights: KeptWeights) -> None:
        self._weights = weights

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        weights = self._weights
        inputs = projected[:, : weights.weight.shape[1]]
        found = convolve_kept(inputs, weights.weight, weights.bias, segments, states.inputs)
        return F.silu(found).to(projected.dtype)


class TorchMamba1:
    """A `Mamba1Half` that reads and updates states alone."""

    def __init__(self, weights: Mamba1Weights) -> None:
        self._weights = weights

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        weights = self._weights
        sizes = [weights.channels] * 3 + [weights.state_size] * 2
        values, gates, times, keys, queries = torch.split(projected.float(), sizes, dim=1)
        times = F.softplus(times + weights.bias)
        tokens = Tokens(queries, keys, values * times, times, weights.rate)
        found = by_segments(tokens, values, segments, states.state, step, sequence)
        return found.addcmul_(values, weights.skip).mul_(F.silu(gates)).to(projected.dtype)


def step(tokens: Tokens, state: Tensor) -> Tensor:
    """Advance several sequences by a token.

    Args:
        state: [tokens, 1, state_size, channels], overwritten.

    Returns:
        [tokens, channels].
    """
    own = state.squeeze(1)
    own.mul_(tokens.decay()).addcmul_(tokens.key.unsqueeze(2), tokens.value.unsqueeze(1))
    return (tokens.query.unsqueeze(1) @ own).squeeze(1)


def sequence(tokens: Tokens, state: Tensor) -> Tensor:
    """Advance one sequence, in chunks.

    Args:
        state: [1, state_size, channels], overwritten.

    Returns:
        [tokens, channels].
    """
    outputs = torch.empty_like(tokens.value)
    for first in range(0, len(outputs), CHUNK):
        rows = slice(first, first + CHUNK)
        outputs[rows] = _chunk(tokens.part(rows), state[0])
    return outputs


def _chunk(tokens: Tokens, state: Tensor) -> Tensor:
    """Compute all states of a chunk, each time from those of twice as many tokens before: no decay exceeds 1."""
    decay = tokens.decay()
    states = tokens.key.unsqueeze(2) * tokens.value.unsqueeze(1)
    states[0].addcmul_(decay[0], state)
    span = 1
    while span < len(states):
        states[span:] = torch.addcmul(states[span:], decay[span:], states[:-span])
        decay[span:] = decay[span:] * decay[:-span]
        span *= 2
    state.copy_(states[-1])
    return (tokens.query.unsqueeze(1) @ states).squeeze(1)
