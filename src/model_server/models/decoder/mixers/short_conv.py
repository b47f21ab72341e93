"""Short convolutions (LFM2): a token reads gated inputs of a few tokens before it.

Only these inputs are kept, in the KV blocks of the newest tokens: what shares, preempts or frees blocks does the same
for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model_server.layers.linear.linear import Linear
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.recurrence.choice import ShortConvolution, short_convolution
from model_server.weights.matrix import Part
from model_server.weights.products import Products


@dataclass(frozen=True, slots=True)
class ShortConv:
    """gate * convolution(gate * x) of this rank's channels, a `MixerPart`."""

    project: Linear  # rows: the gate of the inputs, the gate of the sums, the inputs
    output: Linear
    index: int  # of the layer in the cache
    convolution: ShortConvolution
    width: int
    kv_shape: KvShape

    @property
    def state_shape(self) -> None:
        """Return None: what it keeps is in the blocks."""

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        assert step.segments is not None, "the decoder knows that it has such layers"
        assert self.kv_shape.newest is not None
        plan = step.segments.convolution(self.width, self.kv_shape.newest)
        return self.convolution(self.project(hidden), step.segments, plan, step.cache.rows[self.index])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A `MixerSpec`, with names relative to the layer; `width` tokens are summed."""

    width: int
    project: str = "conv.in_proj"
    convolution: str = "conv.conv"
    output: str = "conv.out_proj"

    @property
    def has_attention(self) -> bool:
        return False

    def load(self, loader: Loader, spec: Spec, index: int) -> ShortConv:
        prefix, size = f"{spec.names.layers}.{index}.", spec.hidden_size
        drafted = loader.num_drafted
        start, stop = channels = loader.share(size)
        name = prefix + self.project
        parts = [Part(name, ((i * size + start, i * size + stop),), 3 * size) for i in range(3)]
        convolution = prefix + self.convolution
        weight, bias = loader.depthwise([convolution + ".weight"], [channels], size, self.width), None
        if loader.has(convolution + ".bias"):
            bias = loader.vector(convolution + ".bias", [channels], size).float()
        return ShortConv(
            project=loader.column_linear(parts, size),
            output=loader.row_linear(prefix + self.output, channels, size),
            index=index - loader.first_layer,
            convolution=short_convolution(weight, bias, loader.reader.dtype),
            width=self.width,
            kv_shape=KvShape(1, stop - start, 0, newest=kept_inputs(self.width, drafted), dtype=loader.reader.dtype),
        )

    def products(self, spec: Spec) -> Products:
        size = spec.hidden_size
        return Products(linear={self.project: (size, 3 * size), self.output: (size, size)})


def kept_inputs(width: int, num_drafted: int) -> int:
    """Return the inputs kept of a block, for sums of `width` tokens."""
    # A draft of up to `num_drafted` tokens is in the cache before it is checked, with the token before it: what that
    # token reads must outlast them.
    return width + num_drafted if num_drafted else width - 1
