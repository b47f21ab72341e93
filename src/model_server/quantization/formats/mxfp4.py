"""Experts as gpt-oss publishes them: MXFP4, an exponent for 32 floats of 4 bits.

`{name}_blocks` uint8 [experts, out, in / 32, 16], lower bits first; `{name}_scales` uint8 [experts, out, in / 32],
exponents plus 127. Source: OCP Microscaling Formats v1.0, 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.e2m1 import keep_part, powers
from model_server.quantization.formats.common.grouped import finite
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes, cat
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader

BLOCK = 32
_BYTES = BLOCK // 2


class Mxfp4Format:
    """Always [out, in], whatever plain tensors are."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def claims(self, reader: WeightReader, module: str) -> bool:
        return reader.has(module + "_blocks") and reader.has(module + "_scales")

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        return cat([_part(reader, part, wanted) for part in wanted.parts])


def _part(reader: WeightReader, part: Part, wanted: MatrixSlice) -> Codes:
    blocks, exponents = _stored(reader, part.name, wanted)
    num_columns = blocks.shape[1] * BLOCK
    if wanted.num_columns not in (None, num_columns):
        raise StartupError(
            f"weight {part.name}_blocks has {num_columns} inputs; the config asks for {wanted.num_columns}"
        )

    def read(rows: Range, span: Range) -> Tensor:
        return blocks[rows[0] : rows[1]].flatten(1)[:, slice(*span)]

    scales = finite(part.name + "_scales", powers(exponents))
    return keep_part(part.name + "_blocks", num_columns, scales, BLOCK, part, wanted.columns, read)


def _stored(reader: WeightReader, name: str, wanted: MatrixSlice) -> tuple[Tensor, Tensor]:
    """Return the expert's blocks [out, in / 32, 16] and exponents [out, in / 32]."""
    shape, scales = reader.shape(name + "_blocks"), reader.shape(name + "_scales")
    if len(shape) != 4 or shape[3] != _BYTES or scales != shape[:3]:
        raise StartupError(
            f"weight {name}_blocks has shape {list(shape)} and {name}_scales {list(scales)}; MXFP4 asks for [experts, "
            f"out, in / {BLOCK}, {_BYTES}] and the same without the last dimension"
        )
    types = {reader.stored(name + "_blocks"), reader.stored(name + "_scales")}
    if not types <= {"U8", "F8_E8M0"}:
        raise StartupError(f"weight {name}_blocks or its scales are stored as {', '.join(sorted(types))}, not as bytes")
    if wanted.expert is None or wanted.expert >= shape[0] or wanted.num_experts not in (None, shape[0]):
        asked = wanted.expert if wanted.num_experts is None else wanted.num_experts
        raise StartupError(f"weight {name}_blocks holds {shape[0]} experts; the config asks for {asked}")
    last = max(stop for part in wanted.parts for _, stop in part.rows)
    if last > shape[1] or any(part.num_rows not in (None, shape[1]) for part in wanted.parts):
        rows = wanted.parts[0].num_rows or f"{last} at least"
        raise StartupError(f"weight {name}_blocks has {shape[1]} outputs; the config asks for {rows}")
    one = (wanted.expert, wanted.expert + 1)
    return reader.raw(name + "_blocks", one)[0], reader.raw(name + "_scales", one)[0].view(torch.uint8)
