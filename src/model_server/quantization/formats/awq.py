"""Matrices as awq's writers store them (version gemm, 4 bits).

Under `{module}.`: `qweight` int32 [in, out / 8]; `qzeros` int32 [groups, out / 8], which may be missing: 8; `scales`
[groups, out].
"""

from __future__ import annotations

from collections.abc import Mapping
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

BITS, IN_WORD = 4, 8
# Which of a word's eight fields holds output 0, 1, ... of its eight.
_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqFormat:
    """Groups follow from shapes where the config's do not fit."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        group = config.get("group_size")
        self._group = group if type(group) is int else None

    def claims(self, reader: WeightReader, module: str) -> bool:
        words, scales = module + ".qweight", module + ".scales"
        if not (reader.has(words) and reader.has(scales)):
            return False
        num_words, num_rows = reader.shape(words)[-1:], reader.shape(scales)[-1:]
        return [IN_WORD * size for size in num_words] == list(num_rows) != []

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        refuse_stacks(wanted, serves_transposed=True)
        return cat([self._part(reader, part, wanted) for part in wanted.parts])

    def _part(self, reader: WeightReader, part: Part, wanted: MatrixSlice) -> Codes:
        name = part.name + ".qweight"

        def codes(rows: Range, columns: Range) -> Tensor:
            first = rows[0] // IN_WORD
            found = _outputs(read_words(reader, name, columns, (first, -(-rows[1] // IN_WORD))))
            return found[:, rows[0] - first * IN_WORD : rows[1] - first * IN_WORD].t().contiguous()

        return keep(self._stored(reader, part, wanted), part, wanted.columns, codes)

    def _stored(self, reader: WeightReader, part: Part, wanted: MatrixSlice) -> Grouped:
        names = [f"{part.name}.{name}" for name in ("qweight", "scales", "qzeros")]
        shapes = [shape_of(reader, name) for name in names if name != names[2] or reader.has(name)]
        num_columns, num_rows = wanted.num_columns or shapes[0][0], part.num_rows or shapes[1][-1]
        num_groups = shapes[1][0]
        group = group_size(num_columns, num_groups, self._group)
        num_words = num_rows // IN_WORD
        expected = [(num_columns, num_words), (num_groups, num_rows), (num_groups, num_words)]
        for name, shape, asked in zip(names, shapes, expected, strict=False):
            if shape != asked or group is None:
                raise misfit(name, shape, BITS, group or 0, (num_rows, num_columns), asked)
        scales = read_scales(reader, names[1]).t()
        zeros = torch.full_like(scales, 8, dtype=torch.uint8)
        if reader.has(names[2]):
            zeros = _outputs(read_words(reader, names[2])).t()
        return Grouped(
            name=names[0], bits=BITS, num_columns=num_columns, scales=scales, zeros=zeros, group=group or num_columns
        )


def _outputs(words: Tensor) -> Tensor:
    """Unpack words [n, out / 8] int32 to [n, out] uint8."""
    fields = unpack(words, BITS, words.shape[1] * IN_WORD, dense=True)
    return fields.view(len(words), -1, IN_WORD)[:, :, _FIELDS].flatten(1)
