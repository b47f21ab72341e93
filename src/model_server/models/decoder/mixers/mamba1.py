"""Mamba-1 (Jamba, Mamba): a decaying state of each channel; a product within chooses what is added to it, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from model_server.layers.linear.linear import Linear
from model_server.layers.norm import Norm
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.blocks import Reduce
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.recurrence.choice import Mamba1Half, kept_convolution, mamba1
from model_server.recurrence.mamba1 import KeptWeights, Mamba1Weights
from model_server.recurrence.states import StateShape
from model_server.weights.matrix import Part
from model_server.weights.products import Products
from model_server.weights.reader import Range

# Of what is chosen, in this order.
_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Mamba-1 of this rank's channels, a `MixerPart`."""

    project: Linear  # rows: inputs, gates
    choose: Linear  # partial sums; rows: what `times` reads, B, C, of all channels
    reduce: Reduce
    norms: tuple[Norm, ...]  # of each of these; empty: none
    times: Linear
    output: Linear
    index: int  # of the layer among this rank's
    convolution: Mamba1Half
    recurrence: Mamba1Half
    chosen: list[int]  # sizes of what is chosen
    state_shape: StateShape

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(0, 0, 0)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Return [num_tokens, channels] of [num_tokens, hidden], before the output product."""
        assert step.recurrent is not None and step.states is not None, "the decoder knows that it has such layers"
        states = step.states.layer(self.index)
        projected = self.project(hidden)
        inputs = step.recurrent(self.convolution, projected, states.inputs_alone)
        parts = torch.split(self.reduce(self.choose(inputs)), self.chosen, dim=1)
        if self.norms:
            parts = tuple(norm(part.contiguous()) for norm, part in zip(self.norms, parts, strict=True))
        times, keys, queries = parts
        gates = projected[:, inputs.shape[1] :]
        read = torch.cat((inputs, gates, self.times(times.contiguous()), keys, queries), dim=1)
        return step.recurrent(self.recurrence, read, states.state_alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Spec:
    """A `MixerSpec`, with names relative to the layer."""

    # Of all ranks.
    channels: int
    state_size: int
    # Numbers of a token from which its steps in time are made.
    rank: int
    # Tokens that a convolution reads, its own included.
    width: int
    prefix: str = "mamba."
    # Of what is chosen: RMS norms with the file's weights, such of ones, none.
    norms: Literal["stored", "ones"] | None = None
    norm_eps: float = 1e-6

    @property
    def has_attention(self) -> bool:
        return False

    @property
    def chosen(self) -> list[int]:
        """Sizes of what is chosen of a token."""
        return [self.rank, self.state_size, self.state_size]

    def load(self, loader: Loader, spec: Spec, index: int) -> Mamba1:
        prefix, size = f"{spec.names.layers}.{index}.{self.prefix}", spec.hidden_size
        channels, count, rows = loader.share(self.channels), self.channels, sum(self.chosen)
        both = channels, (channels[0] + count, channels[1] + count)
        has_bias = loader.has(prefix + "conv1d.bias")

        def vector(name: str) -> Tensor:
            return loader.vector(prefix + name, [channels], count, torch.float32)

        kept = KeptWeights(
            weight=loader.depthwise([prefix + "conv1d.weight"], [channels], count, self.width),
            bias=vector("conv1d.bias") if has_bias else None,
            row_width=2 * (channels[1] - channels[0]),
        )
        weights = Mamba1Weights(
            rate=self._rate(loader, prefix, channels), bias=vector("dt_proj.bias"), skip=vector("D")
        )
        device, dtype = loader.device, loader.reader.dtype
        return Mamba1(
            project=loader.column_linear([Part(prefix + "in_proj", both, 2 * count)], size),
            choose=loader.row_linear(prefix + "x_proj", channels, rows),
            reduce=loader.tensor_group.all_reduce,
            norms=self._norms(loader, prefix),
            times=loader.column_linear([Part(prefix + "dt_proj", (channels,), count)], self.rank, biased=False),
            output=loader.row_linear(prefix + "out_proj", channels, size),
            index=index - loader.first_layer,
            convolution=kept_convolution(kept, device, dtype),
            recurrence=mamba1(weights, device, dtype),
            chosen=self.chosen,
            state_shape=weights.state_shape(self.width, dtype),
        )

    def _rate(self, loader: Loader, prefix: str, channels: Range) -> Tensor:
        """Read [state_size, channels]; the file has a row for each channel."""
        size = self.state_size
        part = channels[0] * size, channels[1] * size
        found = loader.numbers(prefix + "A_log", part, self.channels * size)
        return found.exp().neg_().view(-1, size).t().contiguous()

    def _norms(self, loader: Loader, prefix: str) -> tuple[Norm, ...]:
        if self.norms is None:
            return ()
        if self.norms == "ones":
            ones = [torch.ones(size, device=loader.device) for size in self.chosen]
        else:
            pairs = zip(_NORMS, self.chosen, strict=True)
            ones = [loader.vector(f"{prefix}{name}.weight", [(0, size)], size) for name, size in pairs]
        return tuple(loader.fused.rms_norm(weight, self.norm_eps) for weight in ones)

    def products(self, spec: Spec) -> Products:
        size, count = spec.hidden_size, self.channels
        shapes = {"in_proj": (size, 2 * count), "x_proj": (count, sum(self.chosen))}
        shapes |= {"dt_proj": (self.rank, count), "out_proj": (count, size)}
        return Products(linear={self.prefix + name: shape for name, shape in shapes.items()})
