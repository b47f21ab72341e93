"""Mamba-2 (Granite 4, Bamba, Nemotron H, Falcon H1): a decaying state of each head, to which each token adds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.layers.linear.linear import Linear
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.recurrence.choice import Mamba2Net, mamba2
from model_server.recurrence.mamba2 import Gating, Mamba2Weights, NormPlace
from model_server.recurrence.states import StateShape
from model_server.weights.matrix import Part
from model_server.weights.products import Products
from model_server.weights.reader import Range


class WideGating:
    """A `Gating` whose groups are on several ranks: one sum over the ranks."""

    def __init__(self, here: Gating, groups: int, over: ProcessGroup) -> None:
        """Take this rank's part of the norm; all ranks' outputs are in so many groups of equal size."""
        assert here.norm is not None
        self._norm, self._place, self._eps = here.norm, here.place, here.eps
        self._over, self._groups = over, groups
        count = len(here.norm)
        self._size = count * over.size // groups
        self._group_of = (over.rank * count + torch.arange(count, device=here.norm.device)) // self._size

    def __call__(self, values: Tensor, gates: Tensor) -> Tensor:
        gates = F.silu(gates.float())
        if self._place == "before gates":
            return self._normed(values).mul_(gates)
        return self._normed(values.mul_(gates))

    def _normed(self, values: Tensor) -> Tensor:
        sums = values.new_zeros(len(values), self._groups).index_add_(1, self._group_of, values.square())
        factors = self._over.all_reduce(sums).div_(self._size).add_(self._eps).rsqrt_()
        return values.mul_(factors.index_select(1, self._group_of)).mul_(self._norm)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2 of this rank's heads, a `MixerPart`."""

    project: Linear  # rows: gates, then what the convolution reads, then a step in time for each head
    output: Linear
    index: int  # of the layer among this rank's
    net: Mamba2Net
    gating: WideGating | None  # None: `net` gates
    values: int
    state_shape: StateShape
    input_factor: float
    factors: Tensor | None  # of the rows of `project`

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(0, 0, 0)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Return [num_tokens, values] of [num_tokens, hidden], before the output product."""
        assert step.recurrent is not None and step.states is not None, "the decoder knows that it has such layers"
        projected = self.project(hidden if self.input_factor == 1.0 else hidden * self.input_factor)
        if self.factors is not None:
            projected = projected * self.factors
        found = step.recurrent(self.net, projected, step.states.layer(self.index))
        if self.gating is None:
            return found
        return self.gating(found, projected[:, : self.values]).to(hidden.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """A `MixerSpec`, with names relative to the layer."""

    heads: int
    head_dim: int
    # Heads of a group read the same B and C, and the norm is over its values.
    groups: int
    state_size: int
    # Tokens that a convolution reads, its own included.
    width: int
    # Least and largest step in time.
    limits: tuple[float, float] = (0.0, float("inf"))
    prefix: str = "mamba."
    # Over a group's gated values, or before they are gated; None: there is none.
    norm: NormPlace | None = "behind gates"
    # Of the inputs, and of rows: gates, x, B, C, steps in time.
    input_factor: float = 1.0
    factors: tuple[float, float, float, float, float] = (1.0,) * 5

    @property
    def values(self) -> int:
        """Numbers of a token's inputs and outputs, of all ranks."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that the convolution reads, of all ranks."""
        return self.values + 2 * self.groups * self.state_size

    @property
    def has_attention(self) -> bool:
        return False

    def load(self, loader: Loader, spec: Spec, index: int) -> Mamba2:
        prefix, size = f"{spec.names.layers}.{index}.{self.prefix}", spec.hidden_size
        heads, each = loader.share(self.heads), self.heads // self.groups
        groups = heads[0] // each, (heads[1] - 1) // each + 1
        values = heads[0] * self.head_dim, heads[1] * self.head_dim
        channels = self._channels(values, groups)
        rows = (values, *_behind(channels, self.values), *_behind([heads], self.values + self.channels))
        part = Part(prefix + "in_proj", rows, self.values + self.channels + self.heads)
        bias = None
        if loader.has(prefix + "conv1d.bias"):
            bias = loader.vector(prefix + "conv1d.bias", channels, self.channels, torch.float32)

        def vector(name: str) -> Tensor:
            return loader.vector(prefix + name, [heads], self.heads, torch.float32)

        group = loader.tensor_group
        is_wide = self.norm is not None and self.groups % group.size != 0
        gating = self._gating(loader, spec, prefix, values)
        weights = Mamba2Weights(
            heads=heads[1] - heads[0],
            head_dim=self.head_dim,
            groups=groups[1] - groups[0],
            state_size=self.state_size,
            first=heads[0] - groups[0] * each,
            heads_per_group=each,
            convolution=loader.depthwise([prefix + "conv1d.weight"], channels, self.channels, self.width),
            convolution_bias=bias,
            rate=-vector("A_log").exp(),
            bias=vector("dt_bias"),
            skip=vector("D"),
            limits=self.limits,
            gating=None if is_wide else gating,
        )
        factors = None
        if set(self.factors) != {1.0}:
            counts = [stop - start for start, stop in rows]
            pairs = zip(self.factors, counts, strict=True)
            factors = torch.cat([torch.full((n,), one, dtype=loader.reader.dtype) for one, n in pairs])
            factors = factors.to(loader.device)
        return Mamba2(
            project=loader.column_linear([part], size),
            output=loader.row_linear(prefix + "out_proj", values, size),
            index=index - loader.first_layer,
            net=mamba2(weights, loader.device, loader.reader.dtype),
            gating=WideGating(gating, self.groups, group) if is_wide else None,
            values=values[1] - values[0],
            state_shape=weights.state_shape(loader.reader.dtype),
            input_factor=self.input_factor,
            factors=factors,
        )

    def _gating(self, loader: Loader, spec: Spec, prefix: str, values: Range) -> Gating:
        if self.norm is None:
            return Gating(spec.norm_eps)
        norm = loader.vector(prefix + "norm.weight", [values], self.values, torch.float32)
        return Gating(spec.norm_eps, self.norm, norm, max(1, self.groups // loader.tensor_group.size))

    def _channels(self, values: Range, groups: Range) -> list[Range]:
        """Return what the convolution reads of these values and groups."""
        first, stop = groups[0] * self.state_size, groups[1] * self.state_size
        whole = self.groups * self.state_size
        return [values, *_behind([(first, stop), (whole + first, whole + stop)], self.values)]

    def products(self, spec: Spec) -> Products:
        outputs = self.values + self.channels + self.heads
        return Products(
            linear={
                f"{self.prefix}in_proj": (spec.hidden_size, outputs),
                f"{self.prefix}out_proj": (self.values, spec.hidden_size),
            }
        )


def _behind(ranges: list[Range], count: int) -> list[Range]:
    return [(first + count, stop + count) for first, stop in ranges]
