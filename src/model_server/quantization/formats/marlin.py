"""Matrices in the Marlin kernel's order: 4 bits, groups of 128 or rows.

`{module}.B` int32 [in / 16, 2 * out]; `s` [groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from model_server.quantization.formats.common.grouped import (
    Grouped,
    group_size,
    keep,
    misfit,
    read_scales,
    read_words,
    shape_of,
)
from model_server.quantization.formats.common.storage import refuse_stacks
from model_server.quantization.formats.common.words import unpack
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes, cat
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader

BITS, MIDDLE = 4, 8
HEIGHT, WIDTH = 16, 64  # inputs and outputs of four tiles, which are stored together
_WORDS = HEIGHT * WIDTH * BITS // 32
_FIELDS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight codes each field of a word holds
_SCALES_OF_ROWS = (0, 1, 8, 9, 16, 17, 24, 25)


class MarlinFormat:
    """Groups follow from shapes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        group = config.get("group_size")
        self._group = group if type(group) is int else None

    def claims(self, reader: WeightReader, module: str) -> bool:
        return reader.has(module + ".B") and reader.has(module + ".s")

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        refuse_stacks(wanted, serves_transposed=True)
        return cat([self._part(reader, part, wanted) for part in wanted.parts])

    def _part(self, reader: WeightReader, part: Part, wanted: MatrixSlice) -> Codes:
        name = part.name + ".B"
        reader.skip(part.name + ".workspace")  # memory of the kernel

        def codes(rows: Range, columns: Range) -> Tensor:
            first, last = rows[0] // WIDTH, -(-rows[1] // WIDTH)
            top, bottom = columns[0] // HEIGHT, -(-columns[1] // HEIGHT)
            words = read_words(reader, name, (top, bottom), (first * _WORDS, last * _WORDS))
            found = _in_order(words)
            return found[
                rows[0] - first * WIDTH : rows[1] - first * WIDTH, columns[0] - top * HEIGHT : columns[1] - top * HEIGHT
            ].contiguous()

        return keep(self._stored(reader, part, wanted), part, wanted.columns, codes)

    def _stored(self, reader: WeightReader, part: Part, wanted: MatrixSlice) -> Grouped:
        names = [f"{part.name}.{name}" for name in ("B", "s")]
        shapes = [shape_of(reader, name) for name in names]
        num_columns, num_rows = wanted.num_columns or shapes[0][0] * HEIGHT, part.num_rows or shapes[1][1]
        num_groups = shapes[1][0]
        group = group_size(num_columns, num_groups, self._group)
        expected = [(num_columns // HEIGHT, num_rows * HEIGHT * BITS // 32), (num_groups, num_rows)]
        divides = num_columns % HEIGHT == 0 and num_rows % WIDTH == 0
        for name, shape, asked in zip(names, shapes, expected, strict=True):
            if shape != asked or group is None or not divides:
                raise misfit(name, shape, BITS, group or 0, (num_rows, num_columns), asked)
        stored = read_scales(reader, names[1])
        scales = _scales_in_order(stored).t()
        zeros = torch.full_like(scales, MIDDLE, dtype=torch.uint8)
        return Grouped(
            name=names[0], bits=BITS, num_columns=num_columns, scales=scales, zeros=zeros, group=group or num_columns
        )


@cache
def _places() -> Tensor:
    """Return each stored code's place in [outputs, inputs], of four tiles."""
    position = torch.arange(HEIGHT * WIDTH)
    within, word = position % 8, position // 8
    code = word * 8 + torch.tensor(_FIELDS)[within]
    i, tile, beta, rho = code // 32, code % 32 // 8, code % 8 // 4, code % 4
    inputs = 2 * (i % 4) + rho % 2 + 8 * (rho // 2)
    outputs = tile * 16 + i // 4 + 8 * beta
    return outputs * HEIGHT + inputs


def _in_order(words: Tensor) -> Tensor:
    """Unpack words [inputs / 16, outputs * 2] to codes [outputs, inputs] uint8."""
    tiles = unpack(words, BITS, words.shape[1] * 8, dense=True).view(len(words), -1, HEIGHT * WIDTH)
    ordered = torch.empty_like(tiles)
    ordered[:, :, _places().to(words.device)] = tiles
    return ordered.view(len(words), -1, HEIGHT).permute(1, 0, 2).flatten(1)


def _scales_in_order(stored: Tensor) -> Tensor:
    """Reorder [groups, outputs], which differ for one group a row."""
    width = WIDTH if len(stored) > 1 else 32
    position = torch.arange(width, device=stored.device)
    if len(stored) > 1:
        source = position // 8 + 8 * (position % 8)
    else:
        source = 2 * (position // 8) + torch.tensor(_SCALES_OF_ROWS, device=stored.device)[position % 8]
    ordered = torch.empty_like(stored).view(len(stored), -1, width)
    ordered[:, :, source] = stored.view(len(stored), -1, width)
    return ordered.view_as(stored)
