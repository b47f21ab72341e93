"""Whole numbers as compressed-tensors stores them, packed into words or one to a byte.

`{module}.weight_packed` with `weight_scale` [out, groups] and perhaps `weight_zero_point`, packed along outputs; or
`{module}.weight` int8. Numbers are signed. 8-bit floats are `fp8`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.grouped import Grouped, keep, read_index, read_words
from model_server.quantization.formats.common.storage import block_scales, expect_size, refuse_stacks, skip_inputs
from model_server.quantization.formats.common.targets import Weights, targets_of
from model_server.quantization.formats.common.words import num_words, unpack, words_of
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes, cat
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader

LONGEST_BITS = 8


@dataclass(frozen=True, slots=True)
class Packing:
    """How codes are packed (`words.unpack`)."""

    bits: int
    dense: bool


class CompressedFormat:
    """Takes modules and bits from the config, the rest from tensors."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._targets = targets_of(config)

    def claims(self, reader: WeightReader, module: str) -> bool:
        if reader.has(module + ".weight_packed"):
            return True
        name = module + ".weight"
        return reader.has(name) and reader.stored(name) == "I8" and reader.has(module + ".weight_scale")

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        refuse_stacks(wanted)
        return cat([self._part(reader, part, wanted) for part in wanted.parts])

    def _part(self, reader: WeightReader, part: Part, wanted: MatrixSlice) -> Codes:
        said = self._targets.weights_of(part.name)
        skip_inputs(reader, part.name)
        if reader.has(part.name + ".weight_packed"):
            return _packed(reader, part, wanted, said)
        return _bytes(reader, part, wanted, said)


def _packed(reader: WeightReader, part: Part, wanted: MatrixSlice, said: Weights) -> Codes:
    name = part.name + ".weight_packed"
    size = _size(reader, part, wanted)
    num_words = expect_size(reader, name, size[0], None)[1]
    how = packing(name, num_words, size[1], said.bits)
    zeros = None
    if reader.has(part.name + ".weight_zero_point"):
        zeros = _zero_points(reader, part.name + ".weight_zero_point", how.bits, size[0])

    def codes(rows: Range, columns: Range) -> Tensor:
        return packed_codes(reader, name, how, rows, columns)

    return keep(_grouped(reader, part.name, said.block, size, zeros, how.bits), part, wanted.columns, codes)


def _bytes(reader: WeightReader, part: Part, wanted: MatrixSlice, said: Weights) -> Codes:
    name = part.name + ".weight"
    size = expect_size(reader, name, part.num_rows, wanted.num_columns)
    zeros = None
    if reader.has(part.name + ".weight_zero_point"):
        zeros = _signed_bytes(reader, part.name + ".weight_zero_point", LONGEST_BITS)

    def codes(rows: Range, columns: Range) -> Tensor:
        return _unsigned(reader.raw(name, rows, columns))

    return keep(_grouped(reader, part.name, said.block, size, zeros, LONGEST_BITS), part, wanted.columns, codes)


def _grouped(
    reader: WeightReader, module: str, block: tuple[int, int], size: tuple[int, int], zeros: Tensor | None, bits: int
) -> Grouped:
    """Read all rows' scales and zero points; None: 2 ** (bits - 1)."""
    stored, (height, group) = block_scales(reader, module, size, block)
    if not stored.is_floating_point():
        raise StartupError(
            f"the scales of weight {module} are stored as bytes, those of whole numbers are floating point"
        )
    if zeros is not None and zeros.numel() != stored.numel():
        raise StartupError(
            f"weight {module}.weight_zero_point holds {zeros.numel()} numbers; {stored.numel()} scales do"
        )
    found = torch.full_like(stored, 1 << bits - 1, dtype=torch.uint8) if zeros is None else zeros.reshape(stored.shape)
    scales, found = (of.repeat_interleave(height, 0)[: size[0]] for of in (stored, found))
    index = None
    if reader.has(module + ".weight_g_idx"):
        index = read_index(reader, module + ".weight_g_idx", size[1], scales.shape[1])
        if bool((index < 0).any()) or torch.equal(index.long(), torch.arange(size[1], device=index.device) // group):
            index = None  # as the library writes it where nothing is in another order
    return Grouped(name=module, bits=bits, num_columns=size[1], scales=scales, zeros=found, group=group, index=index)


def _size(reader: WeightReader, part: Part, wanted: MatrixSlice) -> tuple[int, int]:
    """Return a packed matrix's size, which words do not say exactly."""
    name = part.name + ".weight_shape"
    stored = reader.raw(name).tolist()
    asked = part.num_rows, wanted.num_columns
    if len(stored) != 2 or any(said is not None and said != found for found, said in zip(stored, asked, strict=False)):
        raise StartupError(f"weight {name} is {stored}; the config asks for {list(asked)}")
    return stored[0], stored[1]


def _signed_bytes(reader: WeightReader, name: str, bits: int) -> Tensor:
    """Read bytes of `bits` bits as codes."""
    if reader.stored(name) != "I8":
        raise StartupError(f"weight {name} is stored as {reader.stored(name)}; zero points of bytes are I8")
    return (reader.raw(name).short() + (1 << bits - 1)).to(torch.uint8)


def _unsigned(numbers: Tensor) -> Tensor:
    """Shift bytes from -128 to 0."""
    return numbers.view(torch.uint8) ^ 128


def packing(name: str, width: int, num_columns: int, bits: int | None) -> Packing:
    """Find how `num_columns` codes fill `width` words; older files hold whole codes only."""
    asked = range(1, LONGEST_BITS + 1) if bits is None else (bits,)
    for dense in (True, False):
        for known in asked:
            if num_words(num_columns, known, dense=dense) == width:
                return Packing(known, dense)
    what = "1 to 8 bits" if bits is None else f"{bits} bits ask for {num_words(num_columns, bits, dense=True)}"
    raise StartupError(f"weight {name} has {width} words a row; {num_columns} columns of {what}")


def packed_codes(reader: WeightReader, name: str, how: Packing, rows: Range, columns: Range) -> Tensor:
    """Read codes [rows, columns] uint8 packed along columns."""
    start, stop = columns
    first, last, begin = words_of(start, stop, how.bits, dense=how.dense)
    words = read_words(reader, name, rows, (first, last))
    return unpack(words, how.bits, stop - begin, dense=how.dense)[:, start - begin :]


def _zero_points(reader: WeightReader, name: str, bits: int, num_rows: int) -> Tensor:
    """Read codes [num_rows, columns] uint8 packed along rows; older files hold bytes."""
    if reader.stored(name) == "I8":
        return _signed_bytes(reader, name, bits)
    words = read_words(reader, name).t()
    return unpack(words, bits, num_rows, dense=words.shape[1] == num_words(num_rows, bits, dense=True)).t()
