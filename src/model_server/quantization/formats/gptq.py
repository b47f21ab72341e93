"""Matrices as gptq's writers store them.

`{module}.qweight` int32 [in * bits / 32, out], a stream down each column; `qzeros` int32 [groups, out * bits / 32];
`scales` [groups, out]; `g_idx` [in], each input's group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.grouped import (
    Grouped,
    group_size,
    keep,
    misfit,
    read_index,
    read_scales,
    read_words,
    shape_of,
)
from model_server.quantization.formats.common.storage import refuse_stacks
from model_server.quantization.formats.common.words import WORD, unpack, words_of
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes, cat
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader
from wire.quantization.config import stores_whole_zeros

BITS = (2, 3, 4, 8)


class GptqFormat:
    """Bits and groups follow from shapes, columns' order from `g_idx`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits, group = config.get("bits"), config.get("group_size")
        self._bits = bits if type(bits) is int and bits in BITS else 4
        self._group = group if type(group) is int else None
        self._is_second = stores_whole_zeros(config)
        self._is_symmetric = config.get("sym") is not False
        self._says_symmetric = config.get("sym") is True

    def claims(self, reader: WeightReader, module: str) -> bool:
        return reader.has(module + ".qweight")

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        """Read as [out, in], whatever plain matrices are."""
        refuse_stacks(wanted, serves_transposed=True)
        return cat([self._part(reader, part, wanted) for part in wanted.parts])

    def _part(self, reader: WeightReader, part: Part, wanted: MatrixSlice) -> Codes:
        stored = self._stored(reader, part, wanted)
        name = part.name + ".qweight"

        def codes(rows: Range, columns: Range) -> Tensor:
            first, last, skipped = words_of(*columns, stored.bits, dense=True)
            words = read_words(reader, name, (first, last), rows).t().contiguous()
            return unpack(words, stored.bits, columns[1] - skipped, dense=True)[:, columns[0] - skipped :]

        return keep(stored, part, wanted.columns, codes)

    def _stored(self, reader: WeightReader, part: Part, wanted: MatrixSlice) -> Grouped:
        names = {name: f"{part.name}.{name}" for name in ("qweight", "qzeros", "scales", "g_idx")}
        matrices = {name: full for name, full in names.items() if name != "g_idx"}
        shapes = {name: shape_of(reader, full) for name, full in matrices.items()}
        if reader.has(names["g_idx"]):
            shapes["g_idx"] = shape_of(reader, names["g_idx"], 1)
        num_rows, num_groups = part.num_rows or shapes["qweight"][-1], shapes["scales"][0]
        bits = shapes["qzeros"][-1] * WORD // max(num_rows, 1)
        bits = bits if bits in BITS else self._bits
        num_columns = wanted.num_columns or (
            shapes["g_idx"][0] if "g_idx" in shapes else shapes["qweight"][0] * WORD // bits
        )
        group = group_size(num_columns, num_groups, self._group)
        expected = {
            "qweight": (num_columns * bits // WORD, num_rows),
            "qzeros": (num_groups, num_rows * bits // WORD),
            "scales": (num_groups, num_rows),
            "g_idx": (num_columns,),
        }
        for name, shape in shapes.items():
            if shape != expected[name] or (group is None and "g_idx" not in shapes):
                raise misfit(names[name], shape, bits, group or 0, (num_rows, num_columns), expected[name])
        index = read_index(reader, names["g_idx"], num_columns, num_groups) if "g_idx" in shapes else None
        if index is not None and bool((index < 0).any()):
            raise StartupError(f"weight {names['g_idx']} names groups that do not exist: there are {num_groups}")
        if index is not None and group is not None and _is_plain(index, group):
            index = None
        words = read_words(reader, names["qzeros"])
        return Grouped(
            name=names["qweight"],
            bits=bits,
            num_columns=num_columns,
            scales=read_scales(reader, names["scales"]).t(),
            zeros=self._zeros(words, bits, num_rows).t(),
            group=group or num_columns,
            index=index,
        )

    def _zeros(self, words: Tensor, bits: int, count: int) -> Tensor:
        """Read zero points, stored less one in version 1; a symmetric file's middle tells its version."""
        stored = unpack(words, bits, count, dense=True)
        middle = 2 ** (bits - 1)
        if self._is_symmetric and bool((stored == middle).all()):
            return stored
        if self._is_second and not (self._says_symmetric and bool((stored == middle - 1).all())):
            return stored
        if WORD % bits == 0:  # writers subtract from words, so that a zero point of 0 borrows from the next code
            ones = (2**WORD - 1) // (2**bits - 1)
            return unpack(words + (ones - 2**WORD if ones >= 2 ** (WORD - 1) else ones), bits, count, dense=True)
        zeros: Tensor = (stored + 1) & (2**bits - 1)
        return zeros


def _is_plain(index: Tensor, group: int) -> bool:
    return torch.equal(index.long(), torch.arange(len(index), device=index.device) // group)
