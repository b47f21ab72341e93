"""Draws by inverse CDF in vocabulary order, with exact sums.

Probabilities become integers (fixed point, about 2^44 for the most likely token): integer sums do not depend on the
order of addition, so a row's draw is the same in any batch, on any device and however the sum is split, and a token of
weight 0 (masked) can never be reached.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows up to this width are summed in one go; wider ones block by block, then inside the block that holds the draw.
_FLAT_WIDTH = 2048
_BLOCK = 256


def weight_bits(vocab_size: int) -> int:
    """Fixed-point bits of one weight such that `vocab_size` weights of at most 1.0 stay below 2^62."""
    return 62 - vocab_size.bit_length()


def weights(scores: Tensor, bits: int) -> Tensor:
    """`exp(scores)` in fixed point, int64, same shape; `scores` float32 with maximum 0 per row, -inf gives 0."""
    return scores.exp().mul_(float(1 << bits)).to(torch.int64)


def draw(weight: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Columns drawn and row totals, for `weight` [n, width] int64 and `uniforms` [n, 1] float64 in [0, 1).

    Returns ([n, 1] int64, [n, 1] int64). The column is the first whose inclusive cumulative weight exceeds
    u * total, hence one of positive weight. Rows without any weight give some column inside the row.
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
