"""Sampling by inverse CDF in vocabulary order, with exact sums and without a generator's state."""

# Probabilities become integers (fixed point, about 2^44 for the most likely token): integer sums do not depend on the
# order of addition, so a row's token is the same in any batch, on any device and however the sum is split, and a token
# of weight 0 (masked) can never be reached. The random number is a pure function of (seed, number of tokens generated
# so far): a request gets the same numbers alone or in any batch, on every rank, and after it was preempted and computed
# again.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Rows up to this width are summed in one go; wider ones block by block, then inside the block of the sampled one.
_FLAT_WIDTH = 2048
_BLOCK = 256
# Constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], num_generated: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) per row: output `num_generated` of the SplitMix64 stream of the mixed seed."""
    # Seeds are mixed so that close ones do not share a stream; the top 53 bits become the fraction.
    state = _mix(seeds) + _GOLDEN * (num_generated + np.uint64(1))
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def device_uniforms(seeds: Tensor, num_generated: Tensor) -> Tensor:
    """Compute `uniforms` where only the device knows counts: int64 tensors to float64."""
    # Products and sums of int64 have the bits of those of uint64.
    state = _mixed(seeds) + (num_generated + 1) * int(_GOLDEN.view(np.int64))
    return _shifted(_mixed(state), 11).double() * 2.0**-53


def weight_bits(vocab_size: int) -> int:
    """Return bits of one weight such that `vocab_size` of them stay below 2^62."""
    return 62 - vocab_size.bit_length()


def weights(scores: Tensor, bits: int) -> Tensor:
    """Return `exp(scores)` in fixed point, int64; scores float32 with row maximum 0."""
    return scores.exp().mul_(float(1 << bits)).to(torch.int64)


def sample_columns(weight: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample columns, and return row totals, of `weight` [n, width] int64 by `uniforms` [n, 1] float64.

    The first column whose cumulative weight exceeds u * total has positive weight; rows without weight give any column.
    """
    width = weight.shape[1]
    if width <= _FLAT_WIDTH:
        cumulative = weight.cumsum(1)
        total = cumulative[:, -1:]
        target = _target(uniforms, total)
        return _first_above(cumulative, target), total
    num_whole = width // _BLOCK
    sums = weight[:, : num_whole * _BLOCK].reshape(-1, num_whole, _BLOCK).sum(2)
    if num_whole * _BLOCK < width:
        sums = torch.cat([sums, weight[:, num_whole * _BLOCK :].sum(1, keepdim=True)], dim=1)
    cumulative = sums.cumsum(1)
    total = cumulative[:, -1:]
    target = _target(uniforms, total)
    block = _first_above(cumulative, target)
    target = target - (cumulative - sums).gather(1, block)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=weight.device)
    # The last block may be short: past the end its last column repeats, which moves nothing before it.
    inside = weight.gather(1, columns.clamp_(max=width - 1)).cumsum(1)
    return columns.gather(1, _first_above(inside, target)), total


def _target(uniforms: Tensor, total: Tensor) -> Tensor:
    # float64 may round u * total up to total itself; total - 1 still belongs to the last token of positive weight.
    return torch.minimum((uniforms * total).to(torch.int64), total - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    return (cumulative <= target).sum(1, keepdim=True).clamp_(max=cumulative.shape[1] - 1)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * int(_MIX_1.view(np.int64))
    z = (z ^ _shifted(z, 27)) * int(_MIX_2.view(np.int64))
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right, as unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
