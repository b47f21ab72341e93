"""Products with matrices that are not kept as floating point numbers, by any device: decoded piece by piece.

And products with several matrices side by side, each in the way that suits it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.layers.linear.linear import Linear
from model_server.quantization.forms import Form

# What is decoded at a time, in the float32 numbers of the decoding: it stays in a core's cache.
PIECE_BYTES = 2 * 2**20
_ROWS = 16


class DequantizingLinear:
    """Pieces of rows are decoded to the type of the activations, and multiplied."""

    __slots__ = ("_bias", "_form", "_step")

    def __init__(self, form: Form, bias: Tensor | None) -> None:
        self._form = form
        self._bias = bias
        self._step = max(PIECE_BYTES // (4 * max(form.shape[1], 1)) // _ROWS, 1) * _ROWS

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = self._form.shape[0]
        out = x.new_empty(*x.shape[:-1], num_rows)
        for start in range(0, num_rows, self._step):
            stop = min(start + self._step, num_rows)
            bias = None if self._bias is None else self._bias[start:stop]
            out[..., start:stop] = F.linear(x, self._form.rows(start, stop).dequantize(x.dtype), bias)
        return out

    def wide(self, x: Tensor) -> Tensor:
        return self(x).float()


class SplitLinear:
    """Products of the same inputs, one beside the other."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], -1)

    def wide(self, x: Tensor) -> Tensor:
        return torch.cat([part.wide(x) for part in self._parts], -1)
