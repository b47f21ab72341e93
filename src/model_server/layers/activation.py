"""Activations of MLPs, under the names that configs use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.errors import StartupError

Activation = Callable[[Tensor], Tensor]

gelu_tanh: Activation = partial(F.gelu, approximate="tanh")


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid, on CPUs with bits that depend on no other row.

    torch's takes another exp for numbers that fill no vector, so that they change with how many others there are.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return x.sigmoid()
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square_()


# Every function gives a new tensor. transformers has several words for the approximation of GELU by tanh.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_python": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "silu": F.silu,
    "swish": F.silu,
}


def activation(name: str) -> Activation:
    """Return the activation of that name, if served."""
    function = ACTIVATIONS.get(name)
    if function is None:
        raise StartupError(f"config.json: hidden_act {name!r} is not served; served: {', '.join(ACTIVATIONS)}")
    return function


class Gated:
    """function(gate) * up, from [..., 2 * n] (gate, then up) to [..., n]."""

    __slots__ = ("function",)

    def __init__(self, function: Activation) -> None:
        self.function = function

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.function(gate).mul_(up)


def gated(name: str) -> Gated:
    """Return the gated activation of that name."""
    return Gated(activation(name))


def divided(function: Activation, scales: Tensor) -> Activation:
    """Return function(x) / scales, as AWQ's writers have it before a product with weights times `scales` [n]."""

    def apply(x: Tensor) -> Tensor:
        return function(x).div_(scales)

    return apply


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """Return GPT-OSS's gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit`, up within it."""

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return up.clamp(-limit, limit).add_(1).mul_(gate.mul(torch.sigmoid(alpha * gate)))

    return apply
