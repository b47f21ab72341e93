"""torchao's matrices as transformers saves them in safetensors.

`{module}._weight_qdata` [out, in] int8 or e4m3; `_weight_scale`, one or [rows, groups]; `_weight_zero_point` of whole
numbers. Fewer bits are bytes too. Source: torchao's `Int8Tensor`, `IntxUnpackedToInt8Tensor`, `Float8Tensor`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.grouped import Grouped, keep, misfit, read_scales
from model_server.quantization.formats.common.storage import cut_columns, expect_size, kept_rows, refuse_stacks
from model_server.quantization.forms import Form, float8, stacked
from model_server.quantization.forms.codes import Codes, cat
from model_server.quantization.forms.float8 import Fp8, rows_of_blocks
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader

_NUMBERS, _SCALE, _ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
_INPUT_SCALE = "._weight_act_pre_scale"
_MIDDLE = 128
_FLOAT8_INPUTS = "Float8DynamicActivationFloat8WeightConfig"


class TorchaoFormat:
    """Matrices are [out, in], of linear layers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._float8_inputs = _FLOAT8_INPUTS in json.dumps(config.get("quant_type"), default=str)

    def claims(self, reader: WeightReader, module: str) -> bool:
        return reader.has(module + _NUMBERS)

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        refuse_stacks(wanted)
        for part in wanted.parts:
            if reader.has(part.name + _INPUT_SCALE):
                raise StartupError(
                    f"weight {part.name}{_INPUT_SCALE} scales the inputs of a matrix; that is not served"
                )
        forms: list[Form] = []
        for kind, parts in groupby(wanted.parts, key=lambda part: reader.stored(part.name + _NUMBERS)):
            if kind == "F8_E4M3":
                forms.append(float8.cat([self._floats(reader, part, wanted) for part in parts]))
            elif kind == "I8":
                forms.append(cat([_whole_numbers(reader, part, wanted) for part in parts]))
            else:
                name = wanted.parts[0].name + _NUMBERS
                raise StartupError(f"weight {name} is stored as {kind}; of torchao, I8 and F8_E4M3 are served")
        return stacked(forms)

    def _floats(self, reader: WeightReader, part: Part, wanted: MatrixSlice) -> Fp8:
        name = part.name + _NUMBERS
        size = expect_size(reader, name, part.num_rows, wanted.num_columns)
        weight = torch.cat([reader.raw(name, rows, wanted.columns) for rows in part.rows])
        stored, block = _scales(reader, part.name, size)
        if part.order is not None:
            weight = part.order.apply(weight)
        scales, height = rows_of_blocks(stored.float(), block[0], kept_rows(part, weight.device))
        scales, width = cut_columns(scales, block[1], wanted.columns, name, size[1])
        return Fp8(weight, scales.contiguous(), (height, width), self._float8_inputs)


def _whole_numbers(reader: WeightReader, part: Part, wanted: MatrixSlice) -> Codes:
    name = part.name + _NUMBERS
    size = expect_size(reader, name, part.num_rows, wanted.num_columns)
    scales, (height, group) = _scales(reader, part.name, size)
    zeros = _zeros(reader, part.name, scales)
    bits = 4 if _fits_4_bits(reader, part, name) and bool((zeros.abs() <= 7).all()) else 8
    middle = 1 << bits - 1

    def codes(rows: Range, columns: Range) -> Tensor:
        return (reader.raw(name, rows, columns).short() + middle).to(torch.uint8)

    stored = Grouped(
        name=name,
        bits=bits,
        num_columns=size[1],
        scales=scales.repeat_interleave(height, 0),
        zeros=(zeros + middle).to(torch.uint8).repeat_interleave(height, 0),
        group=group,
    )
    return keep(stored, part, wanted.columns, codes)


def _fits_4_bits(reader: WeightReader, part: Part, name: str) -> bool:
    """Whether no row holds a larger number, which the file does not say."""
    for rows in part.rows:
        least, most = torch.aminmax(reader.raw(name, rows))
        if int(least) < -8 or int(most) > 7:
            return False
    return True


def _scales(reader: WeightReader, module: str, size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Return scales as stored, [blocks down, blocks across], and a block's size."""
    name = module + _SCALE
    scales = read_scales(reader, name)
    if scales.numel() == 1:
        return scales.view(1, 1), size
    if scales.dim() != 2 or any(blocks < 1 or whole % blocks for blocks, whole in zip(scales.shape, size, strict=True)):
        raise misfit(name, scales.shape, 8, size[1], size, (size[0], 1))
    return scales, (size[0] // scales.shape[0], size[1] // scales.shape[1])


def _zeros(reader: WeightReader, module: str, scales: Tensor) -> Tensor:
    """Signed, of the shape of the scales."""
    name = module + _ZERO
    if not reader.has(name):
        return torch.zeros_like(scales, dtype=torch.int16)
    zeros = reader.raw(name)
    if zeros.is_floating_point() or zeros.numel() != scales.numel():
        raise StartupError(
            f"weight {name} holds {zeros.numel()} numbers of type {reader.stored(name)}; {scales.numel()} scales ask "
            "for as many whole numbers"
        )
    if bool((zeros.long().clamp(-_MIDDLE, _MIDDLE - 1) != zeros).any()):
        raise StartupError(f"weight {name} holds zero points of more than 8 bits")
    return zeros.view(scales.shape).short()
