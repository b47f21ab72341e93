"""A gated delta net between its products, in plain torch: convolution, gates, the rule, the gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.recurrence import gated_delta
from model_server.recurrence.rows import by_segments, convolve_kept
from model_server.recurrence.segments import Segments
from model_server.recurrence.states import LayerStates, StateShape

# Under the root of the length of a query or a key.
_LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A gated delta net's small tensors, of this rank's heads, in float32."""

    key_heads: int
    # Value heads that read one key head.
    repeats: int
    key_dim: int
    value_dim: int
    convolution: Tensor  # [width, channels]: queries, keys, values
    rate: Tensor  # [value heads], below 0; [keys] of decays that each number of a key has for itself
    bias: Tensor  # the same, of the decays
    norm: Tensor  # [value_dim]
    eps: float
    # How gates become factors of the outputs.
    gating: Literal["silu", "sigmoid"] = "silu"
    most_strength: float = 1.0

    @property
    def by_key(self) -> bool:
        """Whether each number of a key has a decay."""
        return len(self.rate) != self.value_heads

    @property
    def inputs(self) -> int:
        """Return the numbers that a token brings: channels, gates, strengths, decays."""
        return self.convolution.shape[1] + self.values + self.value_heads + len(self.rate)

    @property
    def value_heads(self) -> int:
        """Return this rank's value heads."""
        return self.key_heads * self.repeats

    @property
    def keys(self) -> int:
        """Return the numbers of a token's keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Return the numbers of a token's values."""
        return self.value_heads * self.value_dim

    def state_shape(self, dtype: torch.dtype) -> StateShape:
        """Return what a request's slot holds, with inputs of the type."""
        width, channels = self.convolution.shape
        return StateShape((width - 1, channels), dtype, (self.value_heads, self.key_dim, self.value_dim))


class TorchDeltaNet:
    """A `DeltaNet`."""

    def __init__(self, weights: DeltaWeights) -> None:
        self.weights = weights

    def __call__(self, projected: Tensor, segments: Segments, states: LayerStates) -> Tensor:
        weights, count = self.weights, len(projected)
        keys, values, value_heads = weights.keys, weights.values, weights.value_heads
        sizes = [2 * keys + values, values, value_heads, len(weights.rate)]
        mixed, gate, strength, decay = torch.split(projected, sizes, dim=1)
        mixed = F.silu(convolve_kept(mixed, weights.convolution, None, segments, states.inputs))
        query, key, value = torch.split(mixed, [keys, keys, values], dim=1)
        heads = (count, weights.key_heads, weights.key_dim)
        query = _unit(query.reshape(heads)).mul_(weights.key_dim**-0.5)
        key = _unit(key.reshape(heads))
        if weights.repeats > 1:
            query, key = (t.repeat_interleave(weights.repeats, dim=1) for t in (query, key))
        value = value.reshape(count, value_heads, weights.value_dim)
        strength = strength.float().sigmoid().mul_(weights.most_strength)
        decay = F.softplus(decay.float() + weights.bias).mul_(weights.rate).view(count, value_heads, -1)
        tokens = gated_delta.Tokens(query, key, value, decay, strength)
        found = by_segments(tokens, value, segments, states.state, gated_delta.step, gated_delta.sequence)
        found = F.rms_norm(found, (weights.value_dim,), weights.norm, weights.eps)
        gate = F.silu(gate.float()) if weights.gating == "silu" else gate.float().sigmoid()
        return found.flatten(1).mul_(gate).to(projected.dtype)


def _unit(heads: Tensor) -> Tensor:
    """Return vectors of length 1, float32."""
    heads = heads.float()
    return heads * heads.square().sum(-1, keepdim=True).add_(_LENGTH_EPS).rsqrt_()
