"""GGUF matrices whose rows are blocks: `{module}.weight`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.grouped import PIECE_CODES, SMALLEST_CUT, finite, too_small
from model_server.quantization.formats.common.storage import expect_size, refuse_stacks
from model_server.quantization.forms import Form, codes, offset_codes, stacked, table
from model_server.quantization.forms.codes import Codes
from model_server.quantization.forms.offset_codes import OffsetCodes
from model_server.quantization.forms.table import TableCodes
from model_server.quantization.gguf.decode import DECODERS, decode
from model_server.quantization.gguf.decoded import Decoded
from model_server.weights.gguf.delta_heads import ColumnOrder
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader

Blocks = Codes | OffsetCodes | TableCodes


class GgufFormat:
    """Reads types with a least value (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K) as `OffsetCodes`, those of levels (IQ and MXFP4)
    as `TableCodes`, others as `Codes`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None: ...

    def claims(self, reader: WeightReader, module: str) -> bool:
        name = module + ".weight"
        return reader.has(name) and reader.stored(name) in DECODERS

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        refuse_stacks(wanted)
        return stacked(_merged([_read(reader, part, wanted) for part in wanted.parts]))


def _merged(forms: list[Blocks]) -> list[Form]:
    found: list[Form] = []
    run: list[Blocks] = []
    for form in forms:
        if run and run[0].kind != form.kind:
            found.append(_cat(run))
            run = []
        run.append(form)
    return [*found, _cat(run)]


def _cat(forms: list[Blocks]) -> Form:
    """Join forms of one kind."""
    if plain := [form for form in forms if isinstance(form, Codes)]:
        return codes.cat(plain)
    if offset := [form for form in forms if isinstance(form, OffsetCodes)]:
        return offset_codes.cat(offset)
    return table.cat([form for form in forms if isinstance(form, TableCodes)])


def _read(reader: WeightReader, part: Part, wanted: MatrixSlice) -> Blocks:
    name = part.name + ".weight"
    num_rows, num_columns = expect_size(reader, name, part.num_rows, wanted.num_columns)
    if wanted.columns[1] > num_columns or any(stop > num_rows for _, stop in part.rows):
        asked = max(stop for _, stop in part.rows), wanted.columns[1]
        raise StartupError(
            f"weight {name} has shape {[num_rows, num_columns]}; the config asks for {list(asked)} at least"
        )
    step = max(PIECE_CODES // num_columns, 1)
    pieces = [
        _piece(reader, name, (first, min(first + step, stop)), wanted.columns)
        for start, stop in part.rows
        for first in range(start, stop, step)
    ]
    form = _joined(pieces)
    if part.order is None:
        return form
    return form.permuted(part.order.apply(torch.arange(form.shape[0], device=reader.device)))


def _piece(reader: WeightReader, name: str, rows: Range, columns: Range) -> Blocks:
    kind = reader.stored(name)
    decoded = decode(reader.raw(name, rows), kind)
    if (order := reader.columns(name)) is not None:
        decoded = _ordered(name, decoded, order)
    group, groups = _groups(name, decoded, columns)
    scales = finite(name, decoded.scales[:, groups].contiguous())
    kept = decoded.codes[:, slice(*columns)].contiguous()
    if decoded.table is not None:
        return TableCodes.of(kept, scales, decoded.table, group)
    zeros = torch.full_like(scales, decoded.zero, dtype=torch.uint8)
    form = Codes.of(kept, scales, zeros, group, decoded.bits)
    if decoded.offsets is None:
        return form
    return OffsetCodes(form, finite(name, decoded.offsets[:, groups].contiguous()))


def _ordered(name: str, decoded: Decoded, order: ColumnOrder) -> Decoded:
    """Return the columns in transformers' order."""
    if order.size % decoded.group:
        raise StartupError(
            f"weight {name} has groups of {decoded.group} columns in heads of {order.size}, which is not served"
        )
    return replace(
        decoded,
        codes=order.apply(decoded.codes),
        scales=order.apply(decoded.scales, decoded.group),
        offsets=None if decoded.offsets is None else order.apply(decoded.offsets, decoded.group),
    )


def _groups(name: str, decoded: Decoded, columns: Range) -> tuple[int, Tensor]:
    """Return the size of some columns' groups, and their stored groups."""
    start, stop = columns
    group, num_columns = decoded.group, decoded.codes.shape[1]
    if start % group or (stop % group and stop != num_columns):
        group = math.gcd(group, start, stop - start)
        if group < SMALLEST_CUT:
            raise too_small(name, decoded.group, group, num_columns, stop - start)
    return group, torch.arange(start, stop, group, device=decoded.codes.device) // decoded.group


def _joined(pieces: list[Blocks]) -> Blocks:
    """Rows of one matrix."""
    joined = _cat(pieces)
    assert isinstance(joined, Blocks)
    return joined
