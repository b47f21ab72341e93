"""The dense MLP, gated or not: activation between two products."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model_server.layers.activation import Activation, activation, divided
from model_server.layers.linear.linear import Linear
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.weights.matrix import Part
from model_server.weights.reader import Range


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """down(activation(up(x))) of this rank's part; gated: activation(gate) * up."""

    up: Linear  # rows: gate, then up, if gated
    activation: Activation
    down: Linear

    @property
    def capturable(self) -> bool:
        return True

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        return self.down(self.activation(self.up(hidden)))


def load_mlp(
    loader: Loader, spec: Spec, index: int, *, intermediate_size: int | None = None, prefix: str | None = None
) -> DenseMlp:
    """Load the MLP of layer `index`, or at `prefix`, such as a shared expert."""
    names = spec.names
    prefix = f"{names.layers}.{index}." if prefix is None else prefix
    size = spec.intermediate_size if intermediate_size is None else intermediate_size
    start, stop = share = loader.share(size)
    if spec.gated and len(names.up) == 1:
        name = prefix + names.up[0]
        parts = [Part(name, ((start, stop),), 2 * size), Part(name, ((size + start, size + stop),), 2 * size)]
        if spec.up_before_gate:
            parts.reverse()
    else:
        parts = [Part(prefix + name, (share,), size) for name in names.up]
    return DenseMlp(
        up=loader.column_linear(parts, spec.hidden_size, transposed=spec.transposed),
        activation=_activation(loader, spec, prefix + names.activation, share, size),
        down=loader.row_linear(prefix + names.down, share, spec.hidden_size, transposed=spec.transposed),
    )


def _activation(loader: Loader, spec: Spec, module: str, share: Range, size: int) -> Activation:
    """Return the activation, divided by the scales of `module` [size] if the files hold any."""
    if spec.gated:
        return loader.fused.gated(spec.activation)
    function, scales = activation(spec.activation), module + ".scales"
    return divided(function, loader.vector(scales, [share], size)) if loader.has(scales) else function
