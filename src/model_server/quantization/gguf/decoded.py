"""What a block of a GGUF file is decoded to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of a matrix: `(codes[i, k] - zero) * scales[i, g] - offsets[i, g]`, where g = k // group; with a table
    `table[codes[i, k]] * scales[i, g]`.
    """

    codes: Tensor
    scales: Tensor
    zero: int
    group: int
    bits: int
    offsets: Tensor | None = None
    # [16] float32.
    table: Tensor | None = None


def halves(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16).squeeze(-1)


def nibbles(packed: Tensor) -> Tensor:
    """Split all lower, then all upper four bits."""
    return torch.cat((packed & 15, packed >> 4), -1)
