"""Slopes of ALiBi (arXiv 2108.12409), one per head. For a power of two heads all conventions agree."""

from __future__ import annotations


def bloom_slopes(num_heads: int) -> tuple[float, ...]:
    """BLOOM, Falcon, Baichuan: those of the power of two below, then every second one of the power of two above."""
    power = 2 ** (num_heads.bit_length() - 1)
    return (*_powers(power), *_powers(2 * power)[::2])[:num_heads]


def mpt_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """MPT: those of the power of two above, first every second one from the second on, then the others."""
    power = 2 ** (num_heads - 1).bit_length()
    slopes = _powers(power, bias_max)
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def _powers(count: int, bias_max: float = 8.0) -> tuple[float, ...]:
    return tuple(2.0 ** (-bias_max * i / count) for i in range(1, count + 1))
