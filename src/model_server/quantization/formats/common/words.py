"""Codes of 1 to 8 bits packed into 32-bit words, the first in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32


def num_words(count: int, bits: int, *, dense: bool) -> int:
    """Count the words of codes; `dense` ones may cross words."""
    return -(-count * bits // WORD) if dense else -(-count // (WORD // bits))


def words_of(start: int, stop: int, bits: int, *, dense: bool) -> tuple[int, int, int]:
    """Return the words [first, last) of codes [start, stop), and the first word's first code.

    Dense words begin with a whole code every `bits` words.
    """
    unit, codes = (bits, WORD) if dense else (1, WORD // bits)
    skipped = start // codes
    return skipped * unit, num_words(stop, bits, dense=dense), skipped * codes


def unpack(words: Tensor, bits: int, count: int, *, dense: bool) -> Tensor:
    """Unpack `count` codes per row, [n, words] int32 to [n, count] uint8."""
    if WORD % bits == 0:
        return _whole(words, bits)[:, :count]
    mask = 2**bits - 1
    if not dense:
        shifts = torch.arange(WORD // bits, device=words.device, dtype=torch.int32) * bits
        fields: Tensor = (words.unsqueeze(2) >> shifts) & mask
        return fields.to(torch.uint8).flatten(1)[:, :count]
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    data = torch.cat([data, data.new_zeros(len(data), 1)], 1)
    first = torch.arange(count, device=words.device) * bits
    low, shift = data[:, first // 8].int(), (first % 8).int()
    high = data[:, first // 8 + 1].int()
    codes: Tensor = ((high << 8 | low) >> shift) & mask
    return codes.to(torch.uint8)


def _whole(words: Tensor, bits: int) -> Tensor:
    """Codes that never cross a byte."""
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, device=words.device, dtype=torch.uint8)
    parts: Tensor = (data.unsqueeze(2) >> shifts) & (2**bits - 1)
    return parts.flatten(1)
