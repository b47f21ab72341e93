"""Layers of Falcon H1: attention and Mamba-2 read the same, and their results are added; the MLP has factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.attention.multi_head import load_attention
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.mixers.mamba2 import Mamba2, Mamba2Spec
from model_server.models.decoder.mlp import DenseMlp, load_mlp
from model_server.models.decoder.parts import AttentionPart, Step
from model_server.models.decoder.products import heads_products
from model_server.models.decoder.spec import Spec
from model_server.recurrence.states import StateShape
from model_server.weights.products import ExpertPlace, Products


@dataclass(frozen=True, slots=True)
class Beside:
    """Both, a `MixerPart`."""

    attention: AttentionPart
    mixer: Mamba2
    factors: BesideSpec

    @property
    def kv_shape(self) -> KvShape:
        return self.attention.kv_shape

    @property
    def state_shape(self) -> StateShape:
        return self.mixer.state_shape

    @property
    def output(self) -> Callable[[Tensor], Tensor]:
        return self._sum

    def _sum(self, values: Tensor) -> Tensor:
        attended, mixed = torch.split(values, [values.shape[1] - self.mixer.values, self.mixer.values], dim=1)
        found = self.attention.output(attended.contiguous()).mul_(self.factors.attention_output)
        return found.add_(self.mixer.output(mixed.contiguous()), alpha=self.factors.mixer_output)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        attended = self.attention(hidden * self.factors.attention_input, step)
        return torch.cat((attended, self.mixer(hidden, step)), dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSpec:
    """A `MixerSpec`; factors multiply what attention reads, and what both give."""

    mixer: Mamba2Spec
    attention_input: float
    attention_output: float
    mixer_output: float

    @property
    def has_attention(self) -> bool:
        return True

    def load(self, loader: Loader, spec: Spec, index: int) -> Beside:
        return Beside(load_attention(loader, spec, index), self.mixer.load(loader, spec, index), self)

    def products(self, spec: Spec) -> Products:
        return Products(linear={**heads_products(spec).linear, **self.mixer.products(spec).linear})


@dataclass(frozen=True, slots=True)
class ScaledMlp:
    """output * down(activation(gate * g(x)) * u(x)), an `Mlp`."""

    plain: DenseMlp
    gate: float
    output: float

    @property
    def capturable(self) -> bool:
        return True

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        both = self.plain.up(hidden)
        both[:, : both.shape[1] // 2].mul_(self.gate)
        return self.plain.down(self.plain.activation(both)).mul_(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledMlpSpec:
    """An `MlpSpec`, gated."""

    gate: float
    output: float

    def load(self, loader: Loader, spec: Spec, index: int) -> ScaledMlp:
        return ScaledMlp(load_mlp(loader, spec, index), self.gate, self.output)

    def products(self, spec: Spec) -> Products:
        outer, inner = spec.hidden_size, spec.intermediate_size
        return Products(linear={**dict.fromkeys(spec.names.up, (outer, inner)), spec.names.down: (inner, outer)})

    def places(self, spec: Spec) -> Mapping[str, ExpertPlace]:
        return {}
