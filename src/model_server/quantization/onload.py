"""Plain matrices that are quantized while they are loaded, a piece of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes
from model_server.quantization.forms.float8 import quantize_rows
from model_server.quantization.plain import PlainFormat, tensor_name
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader

# (floating numbers [out, in], the largest magnitude of each whole row, float32 [out]) -> their form.
Quantizer = Callable[[Tensor, Tensor], Form]

# What is read at a time. To quantize it takes two copies in float32 beside it: of 16-bit weights, 5 times as much.
PIECE_BYTES = 16 * 2**20
_MIDDLE = 128


def eetq(weight: Tensor, largest: Tensor) -> Codes:
    """A scale in float16 for each row, largest / 128."""
    return _of_rows(weight, (largest / _MIDDLE).half())


def bitsandbytes(weight: Tensor, largest: Tensor) -> Codes:
    """A scale in float32 for each row, largest / 127. Activations are not quantized, so that no column is spared."""
    return _of_rows(weight, largest / 127)


def _of_rows(weight: Tensor, scales: Tensor) -> Codes:
    scales = scales.unsqueeze(1)
    divisors = scales.float()
    values = (weight.float() / torch.where(divisors > 0, divisors, 1.0)).round_().clamp_(-_MIDDLE, _MIDDLE - 1)
    codes = values.add_(_MIDDLE).to(torch.uint8)
    zeros = torch.full_like(scales, _MIDDLE, dtype=torch.uint8)
    return Codes.of(codes, scales, zeros, codes.shape[1], bits=8)


QUANTIZERS: dict[str, Quantizer] = {"eetq": eetq, "bitsandbytes": bitsandbytes, "fp8": quantize_rows}


def read_quantized(reader: WeightReader, wanted: MatrixSlice, quantize: Quantizer) -> list[Form]:
    """A part of matrices that are stored as they are, each piece of rows in a form of its own.

    A scale is that of a whole row also where some columns of it are kept.
    """
    whole = wanted.whole or (0, _num_columns(reader, wanted))
    first, last = wanted.columns[0] - whole[0], wanted.columns[1] - whole[0]
    forms = []
    for part in wanted.parts:
        for piece in _pieces(part, whole, reader.dtype.itemsize):
            rows = PlainFormat().read(reader, replace(wanted, parts=(piece,), columns=whole)).weight
            forms.append(quantize(rows[:, first:last], rows.abs().amax(1).float()))
    return forms


def _num_columns(reader: WeightReader, wanted: MatrixSlice) -> int:
    shape = reader.shape(tensor_name(reader, wanted.parts[0].name))
    return shape[-2 if wanted.transposed else -1]


def _pieces(part: Part, columns: Range, itemsize: int) -> list[Part]:
    unit = 1 if part.order is None else part.order.head_dim
    step = max(PIECE_BYTES // ((columns[1] - columns[0]) * itemsize * unit), 1) * unit
    spans = [(first, min(first + step, stop)) for start, stop in part.rows for first in range(start, stop, step)]
    return [replace(part, rows=(span,)) for span in spans]
