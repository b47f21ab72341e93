"""Floats of 4 bits (E2M1), two in a byte, the lower bits first, with a scale per group.

Doubled they are whole numbers from -12 to 12: codes with these levels. Source: OCP Microscaling Formats v1.0, 5.3.3.
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
    """Keep a part of a matrix.

    Args:
        scales: [out, groups] float32.
        group: Inputs that share one.
        factor: Scales are its multiples by e4m3 floats; None: any numbers.
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
    """Decode E8M0 exponents (plus 127) to float32."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.view(torch.uint8).int() - 127)
