"""Matrices stored as floating point numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.forms import Plain
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import FLOATING, WeightReader
from wire.text.counting import counted


class PlainFormat:
    """`{module}.weight`, or a tensor `module` of all experts."""

    def claims(self, reader: WeightReader, module: str) -> bool:
        name = tensor_name(reader, module)
        return reader.has(name) and reader.stored(name) in FLOATING

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Plain:
        """Read in place, without a second copy of fused matrices."""
        num_rows = sum(part.num_kept for part in wanted.parts)
        num_columns = wanted.columns[1] - wanted.columns[0]
        weight = torch.empty(num_rows, num_columns, dtype=reader.dtype, device=reader.device)
        first = 0
        for part in wanted.parts:
            last = first + part.num_kept
            _fill(weight[first:last], reader, part, wanted)
            first = last
        return Plain(weight)


def tensor_name(reader: WeightReader, module: str) -> str:
    """Return a plain matrix's name."""
    name = module + ".weight"
    return name if reader.has(name) or not reader.has(module) else module


def _fill(out: Tensor, reader: WeightReader, part: Part, wanted: MatrixSlice) -> None:
    name = tensor_name(reader, part.name)
    sizes = [wanted.num_columns, part.num_rows] if wanted.transposed else [part.num_rows, wanted.num_columns]
    _expect(reader, name, sizes if wanted.expert is None else [wanted.num_experts, *sizes])
    if wanted.transposed:
        first = 0
        for start, stop in part.rows:
            last = first + stop - start
            reader.fill(out[first:last].t(), name, [wanted.columns], (start, stop), index=wanted.expert)
            first = last
        if part.order is not None:
            out.copy_(part.order.apply(out))
    elif part.order is None:
        reader.fill(out, name, part.rows, wanted.columns, index=wanted.expert)
    elif any((stop - start) % part.order.head_dim for start, stop in part.rows):  # a head is several ranges
        reader.fill(out, name, part.rows, wanted.columns, index=wanted.expert)
        out.copy_(part.order.apply(out))
    else:
        place, unit = part.order.place, part.order.head_dim
        reader.fill(out, name, part.rows, wanted.columns, index=wanted.expert, place=place, unit=unit)


def _expect(reader: WeightReader, name: str, sizes: Sequence[int | None]) -> None:
    shape = reader.shape(name)
    if len(shape) != len(sizes):
        raise StartupError(
            f"weight {name} has shape {list(shape)}; the config asks for {counted(len(sizes), 'dimension')}"
        )
    for dimension, size in enumerate(sizes):
        if size is not None and shape[dimension] != size:
            raise StartupError(
                f"weight {name} has shape {list(shape)}; the config asks for {size} at dimension {dimension}"
            )
