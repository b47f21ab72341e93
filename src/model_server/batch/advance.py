"""Moves the rows of a decoding batch on by a token, on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_server.kernels.availability import usable

# (positions [rows] int64, tables [rows, width] int32, block size, kv_lengths [rows] int32, slots [rows] int64).
Advance = Callable[[Tensor, Tensor, int, Tensor, Tensor], None]


def advance_on(device: torch.device) -> Advance:
    """Return the kernel, or plain torch without kernels."""
    if not usable(device):
        return plain
    from model_server.kernels.advance import advance_rows

    return advance_rows


def plain(positions: Tensor, tables: Tensor, block_size: int, kv_lengths: Tensor, slots: Tensor) -> None:
    """Count positions up, and write each row's length and newest slot."""
    positions.add_(1)
    torch.add(positions, 1, out=kv_lengths)
    blocks = tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1)
    torch.add(positions % block_size, blocks, alpha=block_size, out=slots)
