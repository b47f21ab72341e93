"""Matrices as bitsandbytes stores them, mostly through transformers."""

# 4 bits: `{module}.weight` holds the codes of all rows one after another, two to a byte, the first in the upper bits;
# the bytes may be stored as numbers of another type. Under `{module}.weight.`: `quant_state.bitsandbytes__nf4` or
# `__fp4`, the bytes of JSON that says shape and block size; `quant_map` [16], what codes stand for; `absmax`, the scale
# of each block of numbers, which runs on from row to row. With double quantization `absmax` are bytes,
# `nested_quant_map` [256] says what they stand for, and `nested_absmax` is the scale of each block of them;
# `nested_offset` in the JSON is added.
#
# 8 bits: `{module}.weight` int8 [out, in], `{module}.SCB` [out]: 127 times the scale of each row.

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.grouped import PIECE_CODES, Grouped, finite, keep, misfit, read_scales
from model_server.quantization.formats.common.storage import cut_columns, expect_size, kept_rows, refuse_stacks
from model_server.quantization.forms import Form, stacked, table
from model_server.quantization.forms.codes import Codes, cat, packed
from model_server.quantization.forms.table import FP4, NF4, TableCodes
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader

_TABLES = {"nf4": NF4, "fp4": FP4}
_STATE = ".weight.quant_state.bitsandbytes__"
_LARGEST = 127
_MIDDLE = 128
_ROW_MAJOR = 0


@dataclass(frozen=True, slots=True)
class _Stored:
    """A matrix [out, in] of 4 bits."""

    name: str
    kind: str
    shape: tuple[int, int]
    # Numbers that share a scale.
    block: int
    # Of quantized scales: the size of their blocks, and what is added; None: plain.
    double: tuple[int, float] | None


class BitsAndBytesFormat:
    """Matrices are [out, in], whatever plain ones are."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def claims(self, reader: WeightReader, module: str) -> bool:
        return reader.has(module + ".SCB") or _kind(reader, module) is not None

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        refuse_stacks(wanted, serves_transposed=True)
        forms = []
        for in_bytes, parts in groupby(wanted.parts, key=lambda part: reader.has(part.name + ".SCB")):
            if in_bytes:
                forms.append(cat([_eight_bits(reader, part, wanted) for part in parts]))
            else:
                forms.append(table.cat([_four_bits(reader, part, wanted) for part in parts]))
        return stacked(forms)


def _kind(reader: WeightReader, module: str) -> str | None:
    return next((kind for kind in _TABLES if reader.has(module + _STATE + kind)), None)


def _eight_bits(reader: WeightReader, part: Part, wanted: MatrixSlice) -> Codes:
    name = part.name + ".weight"
    size = expect_size(reader, name, part.num_rows, wanted.num_columns)
    if reader.stored(name) != "I8":
        raise StartupError(f"weight {name} is stored as {reader.stored(name)}; beside SCB it must be I8")
    order = part.name + ".weight_format"
    if reader.has(order) and bool((reader.raw(order) != _ROW_MAJOR).any()):
        raise StartupError(f"weight {name} is stored in an order of GPUs; save it with a newer bitsandbytes")
    scales = read_scales(reader, part.name + ".SCB")
    if scales.shape != (size[0],):
        raise misfit(part.name + ".SCB", scales.shape, 8, size[1], size, (size[0],))
    scales = (scales.float() / _LARGEST).unsqueeze(1)

    def codes(rows: Range, columns: Range) -> Tensor:
        return reader.raw(name, rows, columns).view(torch.uint8) ^ _MIDDLE

    stored = Grouped(
        name=name,
        bits=8,
        num_columns=size[1],
        scales=scales,
        zeros=torch.full_like(scales, _MIDDLE, dtype=torch.uint8),
        group=size[1],
    )
    return keep(stored, part, wanted.columns, codes)


def _four_bits(reader: WeightReader, part: Part, wanted: MatrixSlice) -> TableCodes:
    stored = _stored(reader, part, wanted)
    num_columns = stored.shape[1]
    rows = kept_rows(part, reader.device)
    group = math.gcd(stored.block, num_columns)
    firsts = rows.unsqueeze(1) * num_columns + torch.arange(0, num_columns, group, device=rows.device)
    scales = _scales(reader, stored)[firsts // stored.block]
    scales, group = cut_columns(scales, group, wanted.columns, stored.name, num_columns)
    pieces = [piece for span in part.rows for piece in _pieces(span, num_columns)]
    codes = torch.cat([_codes(reader, stored, piece, wanted.columns) for piece in pieces])
    if part.order is not None:
        codes = part.order.apply(codes)
    return TableCodes(codes, scales.contiguous(), _table(reader, stored), group, wanted.columns[1] - wanted.columns[0])


def _stored(reader: WeightReader, part: Part, wanted: MatrixSlice) -> _Stored:
    """Check and describe the stored matrix."""
    name, kind = part.name + ".weight", _kind(reader, part.name) or "nf4"
    state = part.name + _STATE + kind
    try:
        said = json.loads(bytes(reader.raw(state).to(torch.uint8).tolist()))
        (num_rows, num_columns), block = said["shape"], said["blocksize"]
        double = (said["nested_blocksize"], float(said["nested_offset"])) if "nested_offset" in said else None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise StartupError(f"weight {state} cannot be read: {error}") from error
    sizes = (num_rows, num_columns, block, double[0] if double else 1)
    if not all(type(size) is int and size > 0 for size in sizes):
        raise StartupError(f"weight {state} cannot be read: a size is not a positive number")
    asked = part.num_rows, wanted.num_columns
    if any(size not in (None, found) for size, found in zip(asked, (num_rows, num_columns), strict=True)):
        raise StartupError(f"weight {state} says {[num_rows, num_columns]}; the config asks for {list(asked)}")
    last = max(stop for _, stop in part.rows)
    if last > num_rows or wanted.columns[1] > num_columns:
        least = [last, wanted.columns[1]]
        raise StartupError(f"weight {state} says {[num_rows, num_columns]}; the config asks for {least} at least")
    return _Stored(name, kind, (num_rows, num_columns), block, double)


def _table(reader: WeightReader, stored: _Stored) -> Tensor:
    name = stored.name + ".quant_map"
    if not reader.has(name):
        return torch.tensor(_TABLES[stored.kind], dtype=torch.float32, device=reader.device)
    numbers = read_scales(reader, name).float()
    if numbers.shape != (16,):
        raise StartupError(f"weight {name} has shape {list(numbers.shape)}; 4 bits ask for [16]")
    return numbers


def _scales(reader: WeightReader, stored: _Stored) -> Tensor:
    """[blocks] float32."""
    name, num_blocks = stored.name + ".absmax", -(-math.prod(stored.shape) // stored.block)
    if reader.shape(name) != (num_blocks,):
        raise misfit(name, reader.shape(name), 4, stored.block, stored.shape, (num_blocks,))
    if stored.double is None:
        return read_scales(reader, name).float()
    block, offset = stored.double
    if reader.stored(name) != "U8":
        raise StartupError(f"weight {name} is stored as {reader.stored(name)}; scales that are quantized are bytes")
    numbers = read_scales(reader, stored.name + ".nested_quant_map").float()
    nested = read_scales(reader, stored.name + ".nested_absmax").float()
    if numbers.shape != (256,):
        raise StartupError(
            f"weight {stored.name}.nested_quant_map has shape {list(numbers.shape)}; bytes ask for [256]"
        )
    if nested.shape != (-(-num_blocks // block),):
        raise misfit(stored.name + ".nested_absmax", nested.shape, 8, block, stored.shape, (-(-num_blocks // block),))
    values = numbers[reader.raw(name).long()]
    return finite(name, values * nested.repeat_interleave(block)[:num_blocks] + offset)


def _pieces(rows: Range, num_columns: int) -> list[Range]:
    step = max(PIECE_CODES // num_columns, 1)
    return [(first, min(first + step, rows[1])) for first in range(rows[0], rows[1], step)]


def _codes(reader: WeightReader, stored: _Stored, rows: Range, columns: Range) -> Tensor:
    """Read only these rows, and cut the columns, as `TableCodes`."""
    num_rows, num_columns = stored.shape
    shape = reader.shape(stored.name)
    first, last = rows[0] * num_columns, rows[1] * num_columns
    size = reader.raw(stored.name, (0, 1)).element_size()
    if shape != (-(-num_rows * num_columns // (2 * size)), 1):
        expected = [-(-num_rows * num_columns // (2 * size)), 1]
        raise misfit(stored.name, shape, 4, stored.block, stored.shape, expected)
    begin = first // (2 * size)
    data = reader.raw(stored.name, (begin, -(-last // (2 * size)))).view(torch.uint8).flatten()
    codes = torch.stack((data >> 4, data & 15), 1).flatten()[first - begin * 2 * size :][: last - first]
    return packed(codes.view(-1, num_columns)[:, slice(*columns)], 4)
