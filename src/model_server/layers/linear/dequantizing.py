"""Products with matrices decoded piece by piece, on any device; and several products side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.layers.linear.linear import Linear, wide_into
from model_server.quantization.forms import Form
from model_server.quantization.forms.offset_codes import OffsetCodes

# What is decoded at a time, in the float32 numbers of the decoding: it stays in a core's cache.
PIECE_BYTES = 2 * 2**20
_ROWS = 16


class DequantizingLinear:
    """Decodes pieces of rows to the activations' type, and multiplies."""

    __slots__ = ("_bias", "_form", "_step")

    def __init__(self, form: Form, bias: Tensor | None) -> None:
        self._form = form
        self._bias = bias
        self._step = max(PIECE_BYTES // (4 * max(form.shape[1], 1)) // _ROWS, 1) * _ROWS

    def __call__(self, x: Tensor) -> Tensor:
        return self.write(x, x.new_empty(*x.shape[:-1], self._form.shape[0]))

    def wide(self, x: Tensor) -> Tensor:
        return self(x).float()

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        num_rows = self._form.shape[0]
        for start in range(0, num_rows, self._step):
            stop = min(start + self._step, num_rows)
            bias = None if self._bias is None else self._bias[start:stop]
            out[..., start:stop] = F.linear(x, self._form.rows(start, stop).dequantize(x.dtype), bias)
        return out


class OffsetLinear:
    """Multiplies codes without offsets, then adds offsets times each group's sum of inputs."""

    __slots__ = ("_codes", "_group", "_num_padding", "_offsets")

    def __init__(self, codes: Linear, offsets: Linear, form: OffsetCodes) -> None:
        # With `form.codes`, bias included.
        self._codes = codes
        # With `offsets_of(form)`, of float32 numbers.
        self._offsets = offsets
        self._group = form.codes.group
        self._num_padding = offsets_of(form).shape[1] * self._group - form.codes.num_columns

    def __call__(self, x: Tensor) -> Tensor:
        return self.wide(x).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        return self._product(x, None)

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        return self._product(x, out)

    def _product(self, x: Tensor, out: Tensor | None) -> Tensor:
        inputs = F.pad(x, (0, self._num_padding)) if self._num_padding else x
        sums = inputs.reshape(*x.shape[:-1], -1, self._group).sum(-1, dtype=torch.float32)
        return wide_into(self._codes, x, out).sub_(self._offsets(sums))


def offsets_of(form: OffsetCodes) -> Tensor:
    """Return [out, groups] float32, with an even number of groups for panels."""
    return F.pad(form.offsets, (0, 1)) if form.offsets.shape[1] % 2 else form.offsets


class SplitLinear:
    """Products of the same inputs, side by side."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)

    def wide(self, x: Tensor) -> Tensor:
        return torch.cat([part.wide(x) for part in self.parts], -1)
