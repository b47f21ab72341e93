"""Gated delta nets (Qwen 3 Next, Qwen 3.5): each head reads and corrects a state of the tokens before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.adapters.folder import Targets
from model_server.layers.linear.linear import Linear
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.recurrence import gated_delta
from model_server.recurrence.convolution import convolve
from model_server.recurrence.segments import Segments
from model_server.recurrence.states import gather, put
from model_server.weights.matrix import Part
from model_server.weights.reader import Range

# Under the root of the length of a query or a key.
_LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The delta rule of this rank's heads, an `AttentionPart`."""

    project: Linear  # rows: queries, keys, values, gates of the output, then a strength and a decay for each value head
    output: Linear
    index: int  # of the layer among this rank's
    spec: GatedDeltaSpec
    key_heads: int  # of this rank
    convolution: Tensor  # [width, channels] float32
    rate: Tensor  # [value heads] float32, below 0
    bias: Tensor  # [value heads] float32, of the decays
    norm: Tensor  # [value_dim] float32
    eps: float
    itemsize: int  # of an input of the convolution

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(0, 0, 0)

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.spec.repeats

    @property
    def state_bytes(self) -> int:
        """What it keeps of one request."""
        spec = self.spec
        state = self.value_heads * spec.key_dim * spec.value_dim * torch.float32.itemsize
        return state + (spec.width - 1) * self.convolution.shape[1] * self.itemsize

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Compute [num_tokens, value heads * value_dim], before the output product."""
        assert step.segments is not None, "the decoder knows that it has such layers"
        spec, count = self.spec, len(hidden)
        keys, values = self.key_heads * spec.key_dim, self.value_heads * spec.value_dim
        mixed, gate, strength, decay = torch.split(
            self.project(hidden), [2 * keys + values, values, self.value_heads, self.value_heads], dim=1
        )
        mixed = F.silu(self._convolve(mixed, step.segments))
        query, key, value = torch.split(mixed, [keys, keys, values], dim=1)
        heads = (count, self.key_heads, spec.key_dim)
        query = _unit(query.reshape(heads)).mul_(spec.key_dim**-0.5)
        key = _unit(key.reshape(heads))
        if spec.repeats > 1:
            query, key = (t.repeat_interleave(spec.repeats, dim=1) for t in (query, key))
        value = value.reshape(count, self.value_heads, spec.value_dim)
        strength = strength.float().sigmoid()
        decay = F.softplus(decay.float() + self.bias).mul_(self.rate)
        found = self._recur(gated_delta.Tokens(query, key, value, decay, strength), step.segments)
        found = F.rms_norm(found, (spec.value_dim,), self.norm, self.eps)
        return found.flatten(1).mul_(F.silu(gate.float())).to(hidden.dtype)

    def _convolve(self, inputs: Tensor, segments: Segments) -> Tensor:
        """Convolve, and keep each segment's newest inputs."""
        width, key = self.spec.width, (self.index, "inputs")
        previous = gather(segments.requests, key, inputs.new_zeros(width - 1, inputs.shape[1]))
        sources, newest = segments.window(width)
        every = torch.cat((inputs, previous.flatten(0, 1)))
        put(segments.requests, key, every.index_select(0, newest.view(-1)).view_as(previous))
        return convolve(inputs, self.convolution, None, previous, sources)

    def _recur(self, tokens: gated_delta.Tokens, segments: Segments) -> Tensor:
        """Advance single tokens together, longer segments one by one."""
        name = (self.index, "state")
        fresh = tokens.value.new_zeros(self.value_heads, self.spec.key_dim, self.spec.value_dim)
        if segments.is_decode:
            state = gather(segments.requests, name, fresh)
            put(segments.requests, name, state)
            return gated_delta.step(tokens, state)
        outputs = torch.empty_like(tokens.value)
        singles, rows = segments.singles
        if singles:
            requests = [segments.requests[number] for number in singles]
            state = gather(requests, name, fresh)
            put(requests, name, state)
            outputs.index_copy_(0, rows, gated_delta.step(tokens.select(rows), state))
        for request, (first, stop) in zip(segments.requests, segments.spans, strict=True):
            if stop - first > 1:
                state = gather([request], name, fresh)
                put([request], name, state)
                outputs[first:stop] = gated_delta.sequence(tokens.part(slice(first, stop)), state[0])
        return outputs


def _unit(heads: Tensor) -> Tensor:
    """Vectors of length 1, float32."""
    heads = heads.float()
    return heads * heads.square().sum(-1, keepdim=True).add_(_LENGTH_EPS).rsqrt_()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """A `MixerSpec`, with names relative to the layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    # Tokens that a convolution reads, its own included.
    width: int
    # "kinds": a matrix each of queries, keys and values, of gates, of strengths, of decays; "heads": one with each key
    # head's query, key, value heads and gates, and one with its strengths and decays.
    packing: Literal["kinds", "heads"] = "kinds"
    prefix: str = "linear_attn."

    @property
    def repeats(self) -> int:
        """Value heads that read one key head."""
        return self.value_heads // self.key_heads

    def load(self, loader: Loader, spec: Spec, index: int) -> GatedDelta:
        prefix = f"{spec.names.layers}.{index}.{self.prefix}"
        heads = loader.share(self.key_heads)
        values = heads[0] * self.repeats, heads[1] * self.repeats
        channels = self._channels(heads)
        size = self.value_heads
        return GatedDelta(
            project=loader.column_linear(self._parts(prefix, heads), spec.hidden_size),
            output=loader.row_linear(
                prefix + "out_proj", (values[0] * self.value_dim, values[1] * self.value_dim), spec.hidden_size
            ),
            index=index - loader.first_layer,
            spec=self,
            key_heads=heads[1] - heads[0],
            convolution=loader.depthwise(prefix + "conv1d.weight", channels, self._num_channels, self.width),
            rate=-loader.vector(prefix + "A_log", [values], size, torch.float32).exp(),
            bias=loader.vector(prefix + "dt_bias", [values], size, torch.float32),
            norm=loader.vector(prefix + "norm.weight", [(0, self.value_dim)], self.value_dim, torch.float32),
            eps=spec.norm_eps,
            itemsize=loader.reader.dtype.itemsize,
        )

    @property
    def _num_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def _channels(self, heads: Range) -> tuple[Range, Range, Range]:
        """Return these key heads' queries, keys and values."""
        keys = self.key_heads * self.key_dim
        first, stop = heads[0] * self.key_dim, heads[1] * self.key_dim
        each = self.repeats * self.value_dim
        return (first, stop), (keys + first, keys + stop), (2 * keys + heads[0] * each, 2 * keys + heads[1] * each)

    def _parts(self, prefix: str, heads: Range) -> list[Part]:
        each = self.repeats * self.value_dim
        if self.packing == "kinds":
            values = heads[0] * each, heads[1] * each
            ones = heads[0] * self.repeats, heads[1] * self.repeats
            return [
                Part(prefix + "in_proj_qkv", self._channels(heads), self._num_channels),
                Part(prefix + "in_proj_z", (values,), self.value_heads * self.value_dim),
                Part(prefix + "in_proj_b", (ones,), self.value_heads),
                Part(prefix + "in_proj_a", (ones,), self.value_heads),
            ]

        def part(name: str, sizes: tuple[int, ...], number: int) -> Part:
            """Return each key head's part of that number."""
            whole, before = sum(sizes), sum(sizes[:number])
            firsts = (head * whole + before for head in range(*heads))
            return Part(prefix + name, tuple((f, f + sizes[number]) for f in firsts), self.key_heads * whole)

        sizes = self.key_dim, self.key_dim, each, each
        return [
            *(part("in_proj_qkvz", sizes, number) for number in range(4)),
            *(part("in_proj_ba", (self.repeats, self.repeats), number) for number in range(2)),
        ]

    def targets(self, spec: Spec) -> Targets:
        values, size = self.value_heads * self.value_dim, spec.hidden_size
        if self.packing == "kinds":
            outputs = {"qkv": self._num_channels, "z": values, "b": self.value_heads, "a": self.value_heads}
        else:
            outputs = {"qkvz": self._num_channels + values, "ba": 2 * self.value_heads}
        found = {f"{self.prefix}in_proj_{name}": (size, rows) for name, rows in outputs.items()}
        return Targets(linear={**found, f"{self.prefix}out_proj": (values, size)})
