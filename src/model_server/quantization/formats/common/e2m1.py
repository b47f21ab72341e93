"""Floats of 4 bits (E2M1) with a scale for each group of inputs, two in a byte, the first in the lower bits.

Twice a number is a whole one from -12 to 12, so that matrices are those of codes, exactly: these are their levels.
Source: OCP Microscaling Formats v1.0, section 5.3.3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_server.quantization.formats.common.grouped import Grouped, keep
from model_server.quantization.forms.codes import E2M1, Codes
from model_server.weights.matrix import Part
from model_server.weights.reader import Range

# (rows, bytes of each row) of a matrix [out, in / 2] -> these, uint8.
Read = Callable[[Range, Range], Tensor]


def keep_part(
    name: str, num_columns: int, scales: Tensor, group: int, part: Part, columns: Range, read: Read,
    factor: Tensor | None = None,
) -> Codes:  # fmt: skip
    """A part of a matrix. scales: [out, groups] float32, of the numbers themselves; group: inputs that share one.
    factor: one number, of which scales are multiples by e4m3 floats; None: they are any numbers.

    Raises StartupError for groups that would be cut too small.
    """

    def codes(rows: Range, columns: Range) -> Tensor:
        first, last = columns[0] // 2, -(-columns[1] // 2)
        some = read(rows, (first, last))
        numbers = torch.stack((some & 15, some >> 4), dim=2).flatten(1)
        return numbers[:, columns[0] - 2 * first : columns[1] - 2 * first]

    zeros = torch.full(scales.shape, E2M1[0], dtype=torch.uint8, device=scales.device)
    stored = Grouped(
        name=name, bits=4, num_columns=num_columns, scales=scales / 2, zeros=zeros, group=group, levels=E2M1,
        factor=None if factor is None else factor / 2,
    )  # fmt: skip
    return keep(stored, part, columns, codes)


def powers(exponents: Tensor) -> Tensor:
    """E8M0, the exponents of two plus 127 as bytes, as float32."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.view(torch.uint8).int() - 127)
