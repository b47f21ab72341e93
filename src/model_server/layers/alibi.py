"""Slopes of ALiBi (arXiv 2108.12409), one per head; conventions differ if heads are not a power of two."""

from __future__ import annotations


def bloom_slopes(num_heads: int) -> tuple[float, ...]:
    """Return BLOOM's: of the power of two below, then every second of the one above."""
    power = 2 ** (num_heads.bit_length() - 1)
    return (*_powers(power), *_powers(2 * power)[::2])[:num_heads]


def mpt_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """Return MPT's: of the power of two above, every second from the second on first."""
    power = 2 ** (num_heads - 1).bit_length()
    slopes = _powers(power, bias_max)
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def _powers(count: int, bias_max: float = 8.0) -> tuple[float, ...]:
    return tuple(2.0 ** (-bias_max * i / count) for i in range(1, count + 1))
