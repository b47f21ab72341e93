"""Products of a weight as a model on its device and of its type gets them."""

from __future__ import annotations

from torch import Tensor

from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import Linear
from model_server.quantization.forms import Plain


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`x @ weight.T + bias`; weight [out, in], bias [out]."""
    return LinearFactory(weight.device, weight.dtype).make(Plain(weight), bias)
