"""Drafts from the requests' own tokens (the rule of `speculation.lookup`), found where the tokens are.

With h a request's tokens and n their number, g(e) is how many tokens before and at place e < n - 1 are equal to as many
newest ones, at most 8. The draft is what follows the largest g, of equal ones the latest place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_server.kernels.availability import usable

_LONGEST_MATCH = 8

# (history [rows, capacity] int32, lengths [rows] int64, most) -> drafts [rows, most] int64, counts [rows] int64.
LookUp = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def look_up_on(device: torch.device) -> LookUp:
    """The kernel, or plain torch where kernels cannot run."""
    if not usable(device):
        return plain
    from model_server.kernels.speculation.lookup import look_up_rows

    return look_up_rows


def plain(history: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most `most` tokens for each row, `most` at least 1; what a row has fewer is 0.

    history: [rows, capacity] int32, of which each row has `lengths` [rows] int64, at least 1; the rest is not looked
    at. Returns drafts [rows, most] int64 and how many tokens each has, [rows] int64. Does not wait for the device.
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
