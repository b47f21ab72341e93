"""A gated delta net between its products, in plain torch: convolution, gates, the rule, the gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.recurrence import gated_delta
from model_server.recurrence.convolution import convolve
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
    rate: Tensor  # [value heads], below 0
    bias: Tensor  # [value heads], of the decays
    norm: Tensor  # [value_dim]
    eps: float

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
        mixed, gate, strength, decay = torch.split(
            projected, [2 * keys + values, values, value_heads, value_heads], dim=1
        )
        mixed = F.silu(self._convolve(mixed, segments, states.inputs))
        query, key, value = torch.split(mixed, [keys, keys, values], dim=1)
        heads = (count, weights.key_heads, weights.key_dim)
        query = _unit(query.reshape(heads)).mul_(weights.key_dim**-0.5)
        key = _unit(key.reshape(heads))
        if weights.repeats > 1:
            query, key = (t.repeat_interleave(weights.repeats, dim=1) for t in (query, key))
        value = value.reshape(count, value_heads, weights.value_dim)
        strength = strength.float().sigmoid()
        decay = F.softplus(decay.float() + weights.bias).mul_(weights.rate)
        found = _recur(gated_delta.Tokens(query, key, value, decay, strength), segments, states.state)
        found = F.rms_norm(found, (weights.value_dim,), weights.norm, weights.eps)
        return found.flatten(1).mul_(F.silu(gate.float())).to(projected.dtype)

    def _convolve(self, inputs: Tensor, segments: Segments, kept: Tensor) -> Tensor:
        """Sum, and keep each segment's newest inputs."""
        sources, newest = segments.window(len(self.weights.convolution))
        previous = _taken(kept, segments.slots, segments.fresh)
        every = torch.cat((inputs, previous.flatten(0, 1)))
        kept.index_copy_(0, segments.slots, every.index_select(0, newest.view(-1)).view_as(previous))
        return convolve(inputs, self.weights.convolution, None, previous, sources)


def _recur(tokens: gated_delta.Tokens, segments: Segments, states: Tensor) -> Tensor:
    """Compute the rows of one token together, the others one after another."""
    if segments.is_decode:
        return _step(tokens, states, segments.slots_host, segments.slots, segments.fresh)
    outputs = torch.empty_like(tokens.value)
    singles, rows = segments.singles
    if singles:
        fresh = None if segments.fresh is None else segments.fresh[singles]
        slots = [segments.slots_host[number] for number in singles]
        outputs.index_copy_(0, rows, _step(tokens.select(rows), states, slots, segments.slots[singles], fresh))
    for number, (first, stop) in enumerate(segments.spans):
        if stop - first > 1:
            state = states[segments.slots_host[number]]
            if segments.starts_host[number] == 0:
                state.zero_()
            outputs[first:stop] = gated_delta.sequence(tokens.part(slice(first, stop)), state)
    return outputs


def _step(
    tokens: gated_delta.Tokens, states: Tensor, slots_host: list[int], slots: Tensor, fresh: Tensor | None
) -> Tensor:
    """Compute one token of each, in place where the slots follow each other."""
    first = slots_host[0]
    if slots_host == list(range(first, first + len(slots_host))):
        state = states[first : first + len(slots_host)]
        return gated_delta.step(tokens, state if fresh is None else _without(state, fresh))
    state = _taken(states, slots, fresh)
    outputs = gated_delta.step(tokens, state)
    states.index_copy_(0, slots, state)
    return outputs


def _taken(rows: Tensor, slots: Tensor, fresh: Tensor | None) -> Tensor:
    """Return a copy of these slots."""
    taken = rows.index_select(0, slots)
    return taken if fresh is None else _without(taken, fresh)


def _without(rows: Tensor, fresh: Tensor) -> Tensor:
    """Put zeros where a sequence begins: what is in such a slot may be not a number."""
    return rows.masked_fill_(fresh.view(-1, *[1] * (rows.dim() - 1)), 0.0)


def _unit(heads: Tensor) -> Tensor:
    """Return vectors of length 1, float32."""
    heads = heads.float()
    return heads * heads.square().sum(-1, keepdim=True).add_(_LENGTH_EPS).rsqrt_()
