"""8-bit floats (e4m3) of fp8, fbgemm_fp8, modelopt's FP8 and compressed-tensors.

`{module}.weight_scale` or `weight_scale_inv` multiplies `weight`: one number, one a row, or one a block. gptqmodel's
`weight_scale_inv` divides it, as its config says. Activations' scales are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from model_server.quantization.formats.common.storage import (
    block_scales,
    cut_columns,
    expect_size,
    kept_rows,
    refuse_stacks,
    skip_inputs,
)
from model_server.quantization.formats.common.targets import targets_of
from model_server.quantization.forms.float8 import Fp8, cat, rows_of_blocks
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import WeightReader


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns that share a scale by transformers' config, if said."""
    block = config.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    return None


class Fp8Format:
    """Takes the size of blocks from the config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._block = block_size(config)
        self._targets = targets_of(config)
        self._divides = config.get("weight_scale_semantics") == "inverse"
        self._float8_inputs = config.get("activation_scheme") in ("dynamic", "static")

    def claims(self, reader: WeightReader, module: str) -> bool:
        name = module + ".weight"
        return reader.has(name) and reader.stored(name) == "F8_E4M3"

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Fp8:
        refuse_stacks(wanted)
        return cat([self._part(reader, part, wanted) for part in wanted.parts])

    def _part(self, reader: WeightReader, part: Part, wanted: MatrixSlice) -> Fp8:
        name = part.name + ".weight"
        size = expect_size(reader, name, part.num_rows, wanted.num_columns)
        weight = torch.cat([reader.raw(name, rows, wanted.columns) for rows in part.rows])
        stored, block = block_scales(reader, part.name, size, self._block_of(part.name))
        skip_inputs(reader, part.name)
        rows = kept_rows(part, weight.device)
        if part.order is not None:
            weight = part.order.apply(weight)
        # Bytes are exponents: E8M0, by its name or as plain bytes.
        exact = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()
        if self._divides:
            exact = exact.reciprocal()
        scales, height = rows_of_blocks(exact, block[0], rows)
        scales, width = cut_columns(scales, block[1], wanted.columns, name, size[1])
        float8_inputs = self._float8_inputs or self._targets.weights_of(part.name).float8_inputs
        return Fp8(weight, scales.contiguous(), (height, width), float8_inputs)

    def _block_of(self, module: str) -> tuple[int, int]:
        return self._block or self._targets.weights_of(module).block
