"""Quantizes plain matrices while they are loaded, rows by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.quantization.formats.common.storage import cut_columns
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes
from model_server.quantization.forms.float8 import Fp8, quantize_rows
from model_server.quantization.forms.table import FP4, NF4, TableCodes
from model_server.quantization.plain import PlainFormat, tensor_name
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader

# (floating numbers [out, in] of whole rows, the columns that are kept, the matrix's name for errors) -> their form.
Quantizer = Callable[[Tensor, Range, str], Form]

# What is read at a time. To quantize it takes two copies in float32 beside it: of 16-bit weights, 5 times as much.
PIECE_BYTES = 16 * 2**20
_MIDDLE = 128
# Columns that share a scale, of those that are quantized to 4 bits.
BLOCK = 64


def eetq(weight: Tensor, columns: Range, name: str) -> Codes:
    """Scale rows in float16 by their largest magnitude / 128."""
    return _of_rows(weight, columns, (_largest(weight) / _MIDDLE).half())


def bitsandbytes(weight: Tensor, columns: Range, name: str) -> Codes:
    """Scale rows in float32 by their largest magnitude / 127; activations stay, so no column is spared."""
    return _of_rows(weight, columns, _largest(weight) / 127)


def fp8(weight: Tensor, columns: Range, name: str) -> Fp8:
    """Scale rows in float32 by their largest magnitude / 448."""
    return quantize_rows(weight[:, slice(*columns)], _largest(weight))


def nf4(weight: Tensor, columns: Range, name: str) -> TableCodes:
    """Take the table's nearest numbers, scaled by the largest magnitude of 64 columns."""
    return _of_table(weight, columns, NF4, name)


def fp4(weight: Tensor, columns: Range, name: str) -> TableCodes:
    """Quantize as `nf4` by another table."""
    return _of_table(weight, columns, FP4, name)


def _largest(weight: Tensor) -> Tensor:
    """[out, in] -> [out] float32."""
    return weight.abs().amax(1).float()


def _of_rows(weight: Tensor, columns: Range, scales: Tensor) -> Codes:
    scales = scales.unsqueeze(1)
    divisors = scales.float()
    values = weight[:, slice(*columns)].float() / torch.where(divisors > 0, divisors, 1.0)
    codes = values.round_().clamp_(-_MIDDLE, _MIDDLE - 1).add_(_MIDDLE).to(torch.uint8)
    zeros = torch.full_like(scales, _MIDDLE, dtype=torch.uint8)
    return Codes.of(codes, scales, zeros, codes.shape[1], bits=8)


def _of_table(weight: Tensor, columns: Range, numbers: Sequence[float], name: str) -> TableCodes:
    """Round as the library: by the scale's reciprocal, to the lower of two near numbers."""
    table = torch.tensor(numbers, dtype=torch.float32, device=weight.device)
    ordered, order = table.sort(stable=True)
    blocks = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).contiguous().view(len(weight), -1, BLOCK)
    scales = blocks.abs().amax(2)
    blocks.mul_(1 / scales.clamp(min=1e-38).unsqueeze(2)).clamp_(-1, 1)
    codes = order.to(torch.uint8)[torch.bucketize(blocks, (ordered[1:] + ordered[:-1]) / 2, out_int32=True)]
    kept = codes.flatten(1)[:, slice(*columns)]
    cut, group = cut_columns(scales, BLOCK, columns, name, weight.shape[1])
    return TableCodes.of(kept, cut, table, group)


QUANTIZERS: dict[str, Quantizer] = {
    "eetq": eetq,
    "bitsandbytes": bitsandbytes,
    "bitsandbytes-nf4": nf4,
    "bitsandbytes-fp4": fp4,
    "fp8": fp8,
}


def read_quantized(reader: WeightReader, wanted: MatrixSlice, quantize: Quantizer) -> list[Form]:
    """Read and quantize matrices, a form for each piece of rows; scales are of whole rows."""
    whole = wanted.whole or (0, _num_columns(reader, wanted))
    first, last = wanted.columns[0] - whole[0], wanted.columns[1] - whole[0]
    forms = []
    for part in wanted.parts:
        for piece in _pieces(part, whole, reader.dtype.itemsize):
            rows = PlainFormat().read(reader, replace(wanted, parts=(piece,), columns=whole)).weight
            forms.append(quantize(rows, (first, last), part.name))
    return forms


def _num_columns(reader: WeightReader, wanted: MatrixSlice) -> int:
    shape = reader.shape(tensor_name(reader, wanted.parts[0].name))
    return shape[-2 if wanted.transposed else -1]


def _pieces(part: Part, columns: Range, itemsize: int) -> list[Part]:
    unit = 1 if part.order is None else part.order.head_dim
    step = max(PIECE_BYTES // ((columns[1] - columns[0]) * itemsize * unit), 1) * unit
    spans = [(first, min(first + step, stop)) for start, stop in part.rows for first in range(start, stop, step)]
    return [replace(part, rows=(span,)) for span in spans]
