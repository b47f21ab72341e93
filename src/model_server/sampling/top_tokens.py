"""The most likely tokens of rows that ask for them (`top_n_tokens`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Top tokens of some rows, on the host.

    TGI's rule (`utils/tokens.py:batch_top_tokens`): everything at or above the n-th largest value, so ties give more
    than n; what was filtered out never shows, so fewer are possible.
    """

    rows: list[int]  # which rows of the batch
    logprobs: list[list[float]]  # descending; -inf past a row's own number
    ids: list[list[int]]

    @classmethod
    def of(
        cls, scores: Tensor, columns: Tensor | None, log_total: Tensor, wanted: Sequence[tuple[int, int, int]]
    ) -> TopTokens:
        """From a group's `scores` [n, width] (-inf: filtered), `columns` [n, width] and `log_total` [n].

        `wanted`: (row of the group, row of the batch, top_n). Waits for the device: ties decide how many there are.
        """
        device = scores.device
        local = torch.tensor([row for row, _, _ in wanted], device=device)
        numbers = torch.tensor([[min(n, scores.shape[1])] for _, _, n in wanted], device=device)
        scores = scores[local]
        best = scores.topk(int(numbers.max()), dim=1).values
        kept = (scores >= best.gather(1, numbers - 1)) & (scores > -math.inf)
        values, column = scores.masked_fill(~kept, -math.inf).topk(int(kept.sum(1).max()), dim=1)
        ids = column if columns is None else columns[local].gather(1, column)
        logprobs = values - log_total[local, None]
        return cls([row for _, row, _ in wanted], logprobs.tolist(), ids.tolist())

    def to_host(self) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """(row of the batch, its (id, logprob) pairs): most likely first, lower id first among equals."""
        for row, logprobs, ids in zip(self.rows, self.logprobs, self.ids, strict=True):
            pairs = [pair for pair in zip(ids, logprobs, strict=True) if pair[1] > -math.inf]
            pairs.sort(key=lambda pair: (-pair[1], pair[0]))
            yield row, pairs
