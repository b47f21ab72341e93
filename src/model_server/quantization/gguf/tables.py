"""Types of blocks whose codes stand for levels: of one table, or of points of a codebook, with a sign each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model_server.quantization.gguf.codebooks import codebook
from model_server.quantization.gguf.decoded import Decoded, halves, nibbles

_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
_THREE = (8, 25, 43)
_EIGHT = (4, 12, 20, 28, 36, 44, 52, 62)
_ODD = (1, 3, 5, 7, 9, 11, 13, 15)
_SHIFTED = (-0.875, 0.125, 1.125)
"""Levels of IQ1 types; with the other sign of the shift they are the negatives, in the other order."""
_SIGN = 8
"""Of a code whose level is the negative one."""


def _iq4_nl(blocks: Tensor) -> Decoded:
    return _of_table(nibbles(blocks[..., 2:]).flatten(1), halves(blocks[..., :2]), _UNEVEN, 32)


def _iq4_xs(blocks: Tensor) -> Decoded:
    lower = _each(blocks[..., 4:8], (0, 4), 15)
    upper = _each(blocks[..., 2:4], (0, 2, 4, 6), 3)
    scales = _factor(blocks) * ((lower | upper << 4).float() - 32)
    codes = nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16)).flatten(1)
    return _of_table(codes, scales.flatten(1), _UNEVEN, 32)


def _mxfp4(blocks: Tensor) -> Decoded:
    exponents = blocks[..., 0].int()
    # 2 ** (exponent - 128); the two least are not normal numbers.
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1).clamp(min=0) << 23)
    return _of_table(nibbles(blocks[..., 1:]).flatten(1), bits.view(torch.float32), _E2M1, 32)


def _iq2_xxs(blocks: Tensor) -> Decoded:
    points, words = blocks[..., 2:].reshape(*blocks.shape[:2], 8, 2, 4).unbind(-2)
    signs = _words(words.flatten(-2))
    scales = _factor(blocks) * (0.5 + (signs >> 28).float()) * 0.25
    return _of_points(_book("IQ2_XXS", points.flatten(-2)), _signs_of_word(signs), scales, _THREE, 32)


def _iq2_xs(blocks: Tensor) -> Decoded:
    numbers = _shorts(blocks[..., 2:66])
    scales = _factor(blocks) * (0.5 + _each(blocks[..., 66:], (0, 4), 15).float()) * 0.25
    return _of_points(_book("IQ2_XS", numbers & 511), _signs_by_parity(numbers >> 9), scales, _THREE, 16)


def _iq2_s(blocks: Tensor) -> Decoded:
    points = blocks[..., 2:34].int() | _each(blocks[..., 66:74], (0, 2, 4, 6), 3).int() << 8
    scales = _factor(blocks) * (0.5 + _each(blocks[..., 74:], (0, 4), 15).float()) * 0.25
    return _of_points(_book("IQ2_S", points), _bits(blocks[..., 34:66]), scales, _THREE, 16)


def _iq3_xxs(blocks: Tensor) -> Decoded:
    words = _words(blocks[..., 66:])
    scales = _factor(blocks) * (0.5 + (words >> 28).float()) * 0.5
    points = _book("IQ3_XXS", blocks[..., 2:66], width=4)
    return _of_points(points, _signs_of_word(words), scales, _EIGHT, 32)


def _iq3_s(blocks: Tensor) -> Decoded:
    points = blocks[..., 2:66].int() | _bits(blocks[..., 66:74]).flatten(-2).int() << 8
    scales = _factor(blocks) * (1 + 2 * _each(blocks[..., 106:], (0, 4), 15).float())
    return _of_points(_book("IQ3_S", points, width=4), _bits(blocks[..., 74:106]), scales, _ODD, 32)


def _iq1_s(blocks: Tensor) -> Decoded:
    numbers = _shorts(blocks[..., 34:])
    scales = _factor(blocks) * (2 * (numbers >> 12 & 7) + 1).float()
    points = blocks[..., 2:34].int() | _each(numbers, (0, 3, 6, 9), 7) << 8
    below = (numbers >> 15).bool().repeat_interleave(4, -1)
    return _of_shifted(points, below, scales, 32)


def _iq1_m(blocks: Tensor) -> Decoded:
    packed = _shorts(blocks[..., 48:])
    shifts = torch.tensor((12, 8, 4, 0), dtype=torch.int32, device=blocks.device)
    factor = ((packed & 0xF000) >> shifts).sum(-1).to(torch.int16).view(torch.float16).float()
    scales = factor.unsqueeze(-1) * (2 * _each(packed, (0, 3, 6, 9), 7) + 1).float()
    upper = _each(blocks[..., 32:48], (0, 4), 15).int()
    return _of_shifted(blocks[..., :32].int() | (upper & 7) << 8, (upper & 8).bool(), scales, 16)


DECODERS: dict[str, Callable[[Tensor], Decoded]] = {
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "IQ3_S": _iq3_s, "IQ3_XXS": _iq3_xxs, "IQ2_S": _iq2_s,
    "IQ2_XS": _iq2_xs, "IQ2_XXS": _iq2_xxs, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m,
}  # fmt: skip


def _of_table(codes: Tensor, scales: Tensor, levels: Sequence[float], group: int) -> Decoded:
    table = torch.zeros(16, device=codes.device)
    table[: len(levels)] = torch.tensor(levels)
    return Decoded(codes, scales, 0, group, 4, table=table)


def _of_points(points: Tensor, signs: Tensor, scales: Tensor, levels: Sequence[float], group: int) -> Decoded:
    """Join points [n, blocks, 256] and signs, of as many bits.

    Args:
        levels: Of positive signs, at most eight.
    """
    codes = (points.flatten(1) | signs.flatten(1).to(torch.uint8) << 3).contiguous()
    both = (*levels, *(0.0,) * (_SIGN - len(levels)), *(-level for level in levels))
    return _of_table(codes, scales.flatten(1), both, group)


def _of_shifted(indices: Tensor, is_below: Tensor, scales: Tensor, group: int) -> Decoded:
    points = _book("IQ1_S", indices)
    signs = is_below.repeat_interleave(8, -1)
    mirrored = torch.where(signs, 2 - points, points)  # -1, 0, 1 less an eighth are the negatives of 1, 0, -1 and one
    return _of_points(mirrored, signs, scales, _SHIFTED, group)


def _book(kind: str, indices: Tensor, width: int = 8) -> Tensor:
    """Return the points of a codebook [n, blocks, indices * width] uint8."""
    points = codebook(kind, width, 2 if width == 8 else 4).to(indices.device)
    return points.index_select(0, indices.flatten().int()).view(*indices.shape[:-1], -1)


def _signs_of_word(words: Tensor) -> Tensor:
    """Read four times seven bits of each word."""
    return _signs_by_parity(_each(words, (0, 7, 14, 21), 127))


def _signs_by_parity(seven: Tensor) -> Tensor:
    """Unpack seven signs each, and the eighth, which makes their number even: [..., n] to [..., n, 8]."""
    bits = _bits(seven)
    bits[..., 7] = bits[..., :7].sum(-1) & 1
    return bits


def _bits(numbers: Tensor) -> Tensor:
    """Unpack the lowest eight bits, lowest first: [..., n] to [..., n, 8]."""
    return numbers.unsqueeze(-1) >> torch.arange(8, dtype=numbers.dtype, device=numbers.device) & 1


def _each(numbers: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """Cut each number into parts, in order: [..., n] to [..., n * len(shifts)]."""
    return torch.stack([numbers >> shift & mask for shift in shifts], -1).flatten(-2)


def _factor(blocks: Tensor) -> Tensor:
    return halves(blocks[..., :2]).float().unsqueeze(-1)


def _words(data: Tensor) -> Tensor:
    """Read unsigned words of 32 bits, as int64."""
    return data.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _shorts(data: Tensor) -> Tensor:
    """Read unsigned words of 16 bits, as int32."""
    return data.contiguous().view(torch.int16).int() & 0xFFFF
