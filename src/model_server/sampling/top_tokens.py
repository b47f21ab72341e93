"""The most likely tokens of rows that ask for them (`top_n_tokens`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.memory.transfer import download, upload

# Ties beyond the numbers asked for that are looked for at once; more of them are rare and cost a second look.
_TIE_MARGIN = 16


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Top tokens of some rows, on their way to the host.

    As TGI (`batch_top_tokens`): all at or above the n-th largest value, ties included, filtered ones never.
    """

    rows: list[int]  # which rows of the batch
    _scores: Tensor  # [n, width], on the device
    _columns: Tensor | None  # [n, width]
    _peak: Tensor  # [n, 1]: taken off the scores first, as where the chosen token's log probability is computed
    _log_total: Tensor  # [n, 1]
    _least: Tensor  # [n, 1]: each row's n-th largest score
    # The first of them, on the host once the step is over: descending, -inf past a row's own.
    _logprobs: Tensor  # [n, looked at]
    _ids: Tensor
    _num_kept: Tensor  # [n]: how many there are in all

    @classmethod
    def of(
        cls,
        scores: Tensor,
        columns: Tensor | None,
        log_total: Tensor,
        wanted: Sequence[tuple[int, int, int]],
        *,
        peak: Tensor | None = None,
    ) -> TopTokens:
        """Collect from `scores` [n, width] (-inf: filtered), `columns` and `log_total` [n], without waiting.

        Args:
            wanted: (row of the group, row of the batch, top_n).
        """
        width = scores.shape[1]
        local = upload(torch.tensor([row for row, _, _ in wanted]), scores.device)
        numbers = [min(n, width) for _, _, n in wanted]
        places = upload(torch.tensor(numbers)[:, None] - 1, scores.device)
        scores, log_total = scores[local], log_total[local, None]
        peak = torch.zeros_like(log_total) if peak is None else peak[local, None]
        columns = None if columns is None else columns[local]
        values, column = scores.topk(min(max(numbers) + _TIE_MARGIN, width), dim=1)
        least = values.gather(1, places)
        logprobs, ids = _kept(values, column, columns, least, peak, log_total)
        num_kept = ((scores >= least) & (scores > -math.inf)).sum(1)
        return cls(
            rows=[row for _, row, _ in wanted],
            _scores=scores,
            _columns=columns,
            _peak=peak,
            _log_total=log_total,
            _least=least,
            _logprobs=download(logprobs),
            _ids=download(ids),
            _num_kept=download(num_kept),
        )

    def to_host(self) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """Yield each row's (id, logprob) pairs, most likely first; waits only for many ties."""
        logprobs, ids = self._logprobs, self._ids
        most = int(self._num_kept.max())
        if most > logprobs.shape[1]:
            values, column = self._scores.topk(most, dim=1)
            logprobs, ids = _kept(values, column, self._columns, self._least, self._peak, self._log_total)
        for row, row_logprobs, row_ids in zip(self.rows, logprobs.tolist(), ids.tolist(), strict=True):
            pairs = [pair for pair in zip(row_ids, row_logprobs, strict=True) if pair[1] > -math.inf]
            pairs.sort(key=lambda pair: (-pair[1], pair[0]))
            yield row, pairs


def _kept(
    values: Tensor, column: Tensor, columns: Tensor | None, least: Tensor, peak: Tensor, log_total: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log probabilities, -inf below `least`, and ids, [n, count]."""
    ids = column if columns is None else columns.gather(1, column)
    return (values.masked_fill(values < least, -math.inf) - peak) - log_total, ids
