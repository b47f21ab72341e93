"""Matrices as ExLlamaV2 writes them: 2 to 8 bits by group of inputs.

`{module}.q_weight` int32 [words, out], a stream down each column per group; `q_scale` int32 [groups, out / 8], roots of
scales in 4 bits, less one; `q_scale_max` [groups]; `q_groups` int16 [2 * groups], bits and first word; `q_invperm`
int32 [in], each input's stored place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.grouped import Grouped, keep, read_scales, read_words, shape_of
from model_server.quantization.formats.common.storage import refuse_stacks
from model_server.quantization.formats.common.words import WORD, unpack
from model_server.quantization.forms import Form
from model_server.quantization.forms.codes import Codes, cat
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader

BITS = (2, 3, 4, 5, 6, 8)
_SCALE_BITS = 4


@dataclass(frozen=True, slots=True)
class _Group:
    """`count` inputs of equal bits, in words [first, last) of each column."""

    bits: int
    first: int
    last: int

    @property
    def count(self) -> int:
        return (self.last - self.first) * WORD // self.bits


class Exl2Format:
    """All is in the tensors."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def claims(self, reader: WeightReader, module: str) -> bool:
        return reader.has(module + ".q_weight")

    def read(self, reader: WeightReader, wanted: MatrixSlice) -> Form:
        refuse_stacks(wanted, serves_transposed=True)
        return cat([_part(reader, part, wanted) for part in wanted.parts])


def _part(reader: WeightReader, part: Part, wanted: MatrixSlice) -> Codes:
    name = part.name + ".q_weight"
    groups = _groups(reader, part.name)
    places = reader.raw(part.name + ".q_invperm").long()
    num_columns = sum(group.count for group in groups)
    if wanted.num_columns not in (None, num_columns) or places.shape != (num_columns,):
        raise StartupError(
            f"weight {name} holds codes of {num_columns} inputs, and q_invperm {len(places)}; the config asks for "
            f"{wanted.num_columns}"
        )
    if not torch.equal(places.sort()[0], torch.arange(num_columns, device=places.device)):
        raise StartupError(f"weight {part.name}.q_invperm does not name each input once")
    widened = 4 if max(group.bits for group in groups) <= 4 else 8

    def codes(rows: Range, columns: Range) -> Tensor:
        parts = []
        for group in groups:
            words = read_words(reader, name, (group.first, group.last), rows).t().contiguous()
            found = unpack(words, group.bits, group.count, dense=True)
            parts.append(found + (2 ** (widened - 1) - 2 ** (group.bits - 1)))
        return torch.cat(parts, dim=1)[:, places[slice(*columns)]]

    number_of = torch.repeat_interleave(
        torch.arange(len(groups), device=places.device), torch.tensor([g.count for g in groups], device=places.device)
    )
    scales = _scales(reader, part, len(groups)).t()
    stored = Grouped(
        name=name,
        bits=widened,
        num_columns=num_columns,
        scales=scales,
        zeros=torch.full_like(scales, 2 ** (widened - 1), dtype=torch.uint8),
        group=num_columns,
        index=number_of[places],
    )
    return keep(stored, part, wanted.columns, codes)


def _groups(reader: WeightReader, module: str) -> list[_Group]:
    num_words = shape_of(reader, module + ".q_weight")[0]
    said = reader.raw(module + ".q_groups").flatten().tolist()
    bits, firsts = said[::2], [int(first) & 0xFFFF for first in said[1::2]]
    # The first words do not fit 16 bits in tall matrices: they only grow.
    for place in range(1, len(firsts)):
        while firsts[place] < firsts[place - 1]:
            firsts[place] += 1 << 16
    groups = [_Group(int(b), a, z) for b, a, z in zip(bits, firsts, [*firsts[1:], num_words], strict=False)]
    if not groups or any(g.bits not in BITS or g.last <= g.first or (g.last - g.first) * WORD % g.bits for g in groups):
        raise StartupError(f"weight {module}.q_groups does not divide the {num_words} words of q_weight into groups")
    return groups


def _scales(reader: WeightReader, part: Part, num_groups: int) -> Tensor:
    """[groups, out] float32."""
    name = part.name + ".q_scale"
    num_rows = shape_of(reader, name)[1] * WORD // _SCALE_BITS
    if shape_of(reader, name)[0] != num_groups or (part.num_rows is not None and num_rows < part.num_rows):
        raise StartupError(
            f"weight {name} has shape {list(reader.shape(name))}; {num_groups} groups of {part.num_rows} outputs ask "
            f"for {[num_groups, (part.num_rows or num_rows) * _SCALE_BITS // WORD]}"
        )
    roots = unpack(read_words(reader, name), _SCALE_BITS, part.num_rows or num_rows, dense=True).float() + 1
    return roots.square_() * (read_scales(reader, part.name + ".q_scale_max").float() / 256).unsqueeze(1)
