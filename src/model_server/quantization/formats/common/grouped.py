"""What files of whole numbers share: scales and zero points by group, and cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.forms.codes import Codes, Order, packed
from model_server.weights.matrix import Part
from model_server.weights.reader import FLOATING, Range, WeightReader
from wire.text.counting import counted

# Shards cut no groups into pieces of fewer columns; columns that are sorted by group come in pieces of this size.
SMALLEST_CUT = 16
# How much of a matrix is unpacked at a time, in codes.
PIECE_CODES = 4 * 2**20

# (rows, columns) of a matrix [out, in] -> its codes, uint8.
Unpack = Callable[[Range, Range], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """A stored matrix [out, in], with scales [out, groups] and zeros [out, groups] uint8."""

    name: str
    bits: int
    num_columns: int
    scales: Tensor
    zeros: Tensor
    # Inputs that share a scale.
    group: int
    # [in]: each input's group, where its place does not say it.
    index: Tensor | None = None
    levels: tuple[int, ...] | None = None
    # Scales are its multiples by e4m3 floats.
    factor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns that are kept."""

    group: int
    # [new groups] int64: the stored group of each.
    groups: Tensor
    order: Order | None = None
    # For another order than the file's, [kept columns], as `is_padding`.
    sources: Tensor | None = None
    is_padding: Tensor | None = None


def keep(stored: Grouped, part: Part, columns: Range, unpack: Unpack) -> Codes:
    """Keep a part of a stored matrix, if groups are not cut too small."""
    kept = _columns(stored, columns)
    pieces = [_rows(stored, rows, columns, unpack, kept) for span in part.rows for rows in _pieces(span, columns)]
    rows = torch.cat([torch.arange(*span, device=stored.scales.device) for span in part.rows])
    scales, zeros = (t[rows][:, kept.groups].contiguous() for t in (stored.scales, stored.zeros))
    num_columns = columns[1] - columns[0] if kept.sources is None else len(kept.sources)
    factors = None if stored.factor is None else stored.factor.repeat(len(rows))
    form = Codes(
        torch.cat(pieces), scales, zeros, kept.group, num_columns, kept.order, stored.levels, factors=factors
    )  # fmt: skip
    return form if part.order is None else form.permuted(part.order.apply(torch.arange(len(rows), device=rows.device)))


def group_size(num_columns: int, num_groups: int, said: int | None) -> int | None:
    """Return how many columns share a scale, if a size fits; `said` may be wrong."""
    if num_groups == 1:
        return num_columns
    if said is not None and said > 0 and -(-num_columns // said) == num_groups:
        return said
    return num_columns // num_groups if num_groups and num_columns % num_groups == 0 else None


def shape_of(reader: WeightReader, name: str, dimensions: int = 2) -> tuple[int, ...]:
    """Return the shape of a tensor with so many dimensions."""
    shape = reader.shape(name)
    if len(shape) != dimensions:
        raise StartupError(f"weight {name} has shape {list(shape)}; it must have {counted(dimensions, 'dimension')}")
    return shape


def read_words(reader: WeightReader, name: str, rows: Range | None = None, columns: Range | None = None) -> Tensor:
    """Read 32-bit words; other types would be codes of nothing."""
    if reader.stored(name) != "I32":
        raise StartupError(f"weight {name} is stored as {reader.stored(name)}; codes are packed into words of I32")
    return reader.raw(name, rows, columns)


def read_scales(reader: WeightReader, name: str) -> Tensor:
    """Read finite floating-point scales."""
    if reader.stored(name) not in FLOATING:
        raise StartupError(f"weight {name} is stored as {reader.stored(name)}; scales are floating point numbers")
    return finite(name, reader.raw(name))


def finite(name: str, scales: Tensor) -> Tensor:
    """Refuse infinities and NaN, which would make all logits so."""
    if not torch.isfinite(scales).all():
        raise StartupError(f"weight {name} holds scales that are infinite or not numbers: its file is damaged")
    return scales


def read_index(reader: WeightReader, name: str, num_columns: int, num_groups: int) -> Tensor:
    """Read the group of each input, all valid."""
    shape = shape_of(reader, name, 1)
    if shape != (num_columns,):
        raise StartupError(f"weight {name} has shape {list(shape)}; a matrix of {num_columns} inputs asks for as many")
    index = reader.raw(name)
    if index.is_floating_point() or bool((index >= num_groups).any()):
        raise StartupError(f"weight {name} names groups that do not exist: there are {num_groups}")
    return index


def misfit(
    name: str, shape: Sequence[int], bits: int, group: int, size: tuple[int, int], expected: Sequence[int]
) -> StartupError:
    """Return the error for a tensor that does not fit a matrix [out, in]."""
    return StartupError(
        f"weight {name} has shape {list(shape)}; {bits} bits in groups of {group} of a matrix {list(size)} "
        f"ask for {list(expected)}"
    )


def _pieces(rows: Range, columns: Range) -> list[Range]:
    step = max(PIECE_CODES // max(columns[1] - columns[0], 1) // 32, 1) * 32
    return [(first, min(first + step, rows[1])) for first in range(rows[0], rows[1], step)]


def _rows(stored: Grouped, rows: Range, columns: Range, unpack: Unpack, kept: _Columns) -> Tensor:
    codes = unpack(rows, columns)
    if kept.sources is not None:
        codes = codes[:, kept.sources]
        if kept.is_padding is not None:
            zeros = stored.zeros[rows[0] : rows[1]][:, kept.groups].repeat_interleave(kept.group, 1)
            codes = torch.where(kept.is_padding, zeros, codes)
    return packed(codes, stored.bits)


def _columns(stored: Grouped, columns: Range) -> _Columns:
    if stored.index is not None:
        return _sorted(stored.index[slice(*columns)].long())
    (start, stop), group = columns, stored.group
    device = stored.scales.device
    if stored.scales.shape[1] == 1:
        return _Columns(stop - start, torch.zeros(1, dtype=torch.int64, device=device))
    if start % group != 0 or (stop % group != 0 and stop != stored.num_columns):
        group = math.gcd(group, start, stop - start)
        if group < min(SMALLEST_CUT, stored.group):
            raise too_small(stored.name, stored.group, group, stored.num_columns, stop - start)
    return _Columns(group, torch.arange(start, stop, group, device=device) // stored.group)


def too_small(name: str, group: int, piece: int, whole: int, share: int) -> StartupError:
    """Return the error for groups that shards would cut into pieces."""
    shards = whole // share
    fitting = next(
        n for n in range(shards, 0, -1)
        if n == 1 or (shards % n == 0 and math.gcd(group, whole // n) >= SMALLEST_CUT)
    )  # fmt: skip
    return StartupError(
        f"weight {name}: {shards} shards cut groups of {group} into pieces of {piece}; "
        f"at least {SMALLEST_CUT} are needed: use --num-shard {fitting}"
    )


def _sorted(index: Tensor) -> _Columns:
    """Sort columns by group, each group filled up to whole pieces."""
    num_columns = len(index)
    sources = index.argsort(stable=True)
    groups, counts = torch.unique_consecutive(index[sources], return_counts=True)
    size = int(counts[0])
    if size % SMALLEST_CUT == 0 and bool((counts == size).all()):
        return _Columns(size, groups, Order(sources.int(), num_columns), sources)
    num_pieces = (counts + SMALLEST_CUT - 1) // SMALLEST_CUT
    places = torch.arange(SMALLEST_CUT * int(num_pieces.sum()), device=index.device)
    group = torch.arange(len(groups), device=index.device).repeat_interleave(SMALLEST_CUT * num_pieces)
    within = places - (SMALLEST_CUT * (num_pieces.cumsum(0) - num_pieces))[group]
    is_padding = within >= counts[group]
    sources = sources[(counts.cumsum(0) - counts)[group] + torch.where(is_padding, 0, within)]
    order = Order(sources.int(), num_columns)
    return _Columns(SMALLEST_CUT, groups.repeat_interleave(num_pieces), order, sources, is_padding)
