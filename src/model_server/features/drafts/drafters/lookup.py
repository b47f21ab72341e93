"""Drafts from the requests' own tokens (`features.drafts.lookup`), on the device."""

# g(e) is how many tokens up to place e < n - 1 equal the newest, at most 8. The draft follows the largest g, the latest
# of equals.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_server.kernels.availability import usable

_LONGEST_MATCH = 8

# (history [rows, capacity] int32, lengths [rows] int64, most) -> drafts [rows, most] int64, counts [rows] int64.
LookUp = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def look_up_on(device: torch.device) -> LookUp:
    """Return the kernel, or plain torch without kernels."""
    if not usable(device):
        return plain
    from model_server.kernels.speculation.lookup import look_up_rows

    return look_up_rows


def plain(history: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Look up at most `most` tokens for each row, without waiting.

    Args:
        history: [rows, capacity] int32, with `lengths` [rows] int64 each.

    Returns:
        Drafts [rows, most] int64, and their lengths [rows] int64.
    """
    places = torch.arange(history.shape[1], device=history.device)
    last = lengths[:, None] - 1
    equal = (places < last).expand(history.shape)
    matched = torch.zeros_like(history)
    for back in range(_LONGEST_MATCH):
        newest = history.gather(1, (last - back).clamp_(min=0))
        before = history.gather(1, (places - back).clamp_(min=0).expand(history.shape))
        equal = equal & (places >= back) & (before == newest)
        matched += equal
    longest, place = (matched.long() * history.shape[1] + places).max(1)
    longest = matched.gather(1, place[:, None]).squeeze(1).long()
    bound = torch.where(longest > 3, most, torch.where(longest == 3, 4, longest))
    counts = bound.clamp(max=most)
    first = (place + 1)[:, None]
    period = (lengths[:, None] - first).clamp_(min=1)
    number = torch.arange(most, device=history.device)
    followed = (first + number % period).clamp_(max=history.shape[1] - 1)
    drafts = history.gather(1, followed).long()
    return drafts.masked_fill(number >= counts[:, None], 0), counts
