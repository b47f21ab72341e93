"""Lightning attention (MiniMax): Mamba-2's recurrence with steps in time of 1, and heads that decay at fixed rates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.layers.linear.linear import Linear
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.recurrence.choice import Mamba2Net, mamba2
from model_server.recurrence.mamba2 import Mamba2Weights
from model_server.recurrence.states import StateShape
from model_server.weights.matrix import Part
from model_server.weights.products import Products
from model_server.weights.reader import Range

_PREFIX = "self_attn."
# Of the norm behind the recurrence, whatever the config says of the others.
_EPS = 1e-6
# How far stored decays may be from the rule: files hold them in the model's type, where float16 may round them to 0.
_ROUNDING, _LEAST = 1e-2, 1e-7


@dataclass(frozen=True, slots=True)
class WideNorm:
    """An RMS norm over a token's outputs of all ranks, in float32."""

    weight: Tensor  # [values] of this rank
    group: ProcessGroup

    def __call__(self, values: Tensor) -> Tensor:
        """Normalize [num_tokens, values], which are overwritten."""
        sums = self.group.all_reduce(values.square().sum(1, keepdim=True))
        factors = sums.div_(len(self.weight) * self.group.size).add_(_EPS).rsqrt_()
        return values.mul_(factors).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Lightning:
    """Lightning attention of this rank's heads, a `MixerPart`."""

    project: Linear  # rows: gates, values, keys, queries
    output: Linear
    index: int  # of the layer among this rank's
    net: Mamba2Net
    norm: WideNorm
    state_shape: StateShape

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(0, 0, 0)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Return [num_tokens, heads * head_dim], before the output product."""
        assert step.recurrent is not None and step.states is not None, "the decoder knows that it has such layers"
        heads, _, dim = self.state_shape.state
        projected = self.project(hidden)
        steps = F.pad(projected, (0, heads))
        found = step.recurrent(self.net, steps, step.states.layer(self.index))
        gates = projected[:, : heads * dim].float().sigmoid_()
        return self.norm(found).mul_(gates).to(hidden.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec:
    """A `MixerSpec`; queries, keys and values of a head follow each other in one matrix."""

    heads: int
    head_dim: int

    @property
    def has_attention(self) -> bool:
        return False

    @property
    def values(self) -> int:  # of a token's queries, keys or values, of all ranks
        return self.heads * self.head_dim

    def load(self, loader: Loader, spec: Spec, index: int) -> Lightning:
        prefix = f"{spec.names.layers}.{index}.{_PREFIX}"
        heads = loader.share(self.heads)
        values = heads[0] * self.head_dim, heads[1] * self.head_dim
        count = heads[1] - heads[0]
        slopes = self._slopes(index, spec.num_layers)[slice(*heads)]
        if loader.has(prefix + "slope_rate"):
            stored = loader.numbers(prefix + "slope_rate", heads, self.heads).cpu()
            if not torch.allclose(stored, slopes, rtol=_ROUNDING, atol=_LEAST):
                raise StartupError(f"weight {prefix}slope_rate: heads that decay at other rates than MiniMax's rule")
        zeros = torch.zeros(count, device=loader.device)
        weights = Mamba2Weights(
            heads=count,
            head_dim=self.head_dim,
            groups=count,
            state_size=self.head_dim,
            first=0,
            heads_per_group=1,
            convolution=torch.ones(1, 3 * count * self.head_dim, device=loader.device),
            convolution_bias=None,
            rate=-slopes.to(loader.device),
            bias=zeros,
            skip=zeros,
            limits=(1.0, 1.0),
            gating=None,
        )
        return Lightning(
            project=loader.column_linear(self._parts(prefix, heads, values), spec.hidden_size),
            output=loader.row_linear(prefix + "out_proj", values, spec.hidden_size),
            index=index - loader.first_layer,
            net=mamba2(weights, loader.device, loader.reader.dtype),
            norm=WideNorm(
                loader.vector(prefix + "norm.weight", [values], self.values, torch.float32), loader.tensor_group
            ),
            state_shape=weights.state_shape(loader.reader.dtype),
        )

    def _slopes(self, index: int, num_layers: int) -> Tensor:
        """Return how fast each head decays, [heads]: slower with each head and each layer."""
        base = 1 / 2 ** (8 / self.heads)
        return base ** torch.arange(1, self.heads + 1) * (1 - index / (num_layers - 1 + 1e-5) + 1e-5)

    def _parts(self, prefix: str, heads: Range, values: Range) -> list[Part]:
        def part(number: int) -> Part:
            # Of each head: queries, keys, values.
            firsts = ((3 * head + number) * self.head_dim for head in range(*heads))
            return Part(prefix + "qkv_proj", tuple((f, f + self.head_dim) for f in firsts), 3 * self.values)

        return [Part(prefix + "output_gate", (values,), self.values), part(2), part(1), part(0)]

    def products(self, spec: Spec) -> Products:
        size, values = spec.hidden_size, self.values
        shapes = {"qkv_proj": (size, 3 * values), "output_gate": (size, values), "out_proj": (values, size)}
        return Products(linear={_PREFIX + name: shape for name, shape in shapes.items()})
