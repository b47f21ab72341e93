"""Activations of gated MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from model_server.errors import StartupError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu}


def gated(name: str) -> Callable[[Tensor], Tensor]:
    """A function from [..., 2 * n] (gate, then up) to [..., n]: activation(gate) * up."""
    activation = ACTIVATIONS.get(name)
    if activation is None:
        raise StartupError(f"config.json: hidden_act {name!r} is not served; served: {', '.join(ACTIVATIONS)}")

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate).mul_(up)

    return apply
