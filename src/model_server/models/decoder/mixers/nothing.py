"""What a layer has for attention or an MLP where it has only the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.weights.products import ExpertPlace, Products


@dataclass(frozen=True, slots=True)
class Nothing:
    """A `MixerSpec` and an `MlpSpec`, a `MixerPart` and an `Mlp`, which is never called."""

    @property
    def has_attention(self) -> bool:
        return False

    def load(self, loader: Loader, spec: Spec, index: int) -> Nothing:
        return self

    def products(self, spec: Spec) -> Products:
        return Products(linear={})

    def places(self, spec: Spec) -> Mapping[str, ExpertPlace]:
        return {}

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(0, 0, 0)

    @property
    def state_shape(self) -> None:
        return None

    @property
    def capturable(self) -> bool:
        return True

    def output(self, values: Tensor) -> Tensor:
        raise AssertionError("a block knows what it has")

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        raise AssertionError("a block knows what it has")
