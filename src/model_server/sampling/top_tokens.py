"""The most likely tokens of rows that ask for them (`top_n_tokens`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.memory.transfer import download, upload

_MOST_TIES = 16
"""Tokens beyond the number asked for, as likely as the last of that number. Where there are more, they need a second
look."""
_LEAST_LOGPROB = math.log(2.0**-149)
"""Of what has a probability in float32."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Top tokens of some rows, on their way to the host.

    As TGI (`batch_top_tokens`): all at or above the n-th largest value, ties included, filtered ones never. Unlike
    there ties have a bound, and what has the probability 0 does not show: where the scores leave one token, the whole
    vocabulary is tied behind it.
    """

    rows: list[int]  # which rows of the batch
    _scores: Tensor  # [n, width], on the device
    _columns: Tensor | None  # [n, width]
    _peak: Tensor  # [n, 1]: taken off the scores first, as where the chosen token's log probability is computed
    _log_total: Tensor  # [n, 1]
    _least: Tensor  # [n, 1]: each row's n-th largest score, or what the least probability has
    # The first of them, on the host once the step is over: descending, -inf past a row's own.
    _logprobs: Tensor  # [n, looked at]
    _ids: Tensor
    _num_kept: Tensor  # [n]: how many there are in all
    _most: list[int]  # of a row that show

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
        values, column = scores.topk(min(max(numbers) + _MOST_TIES, width), dim=1)
        least = torch.maximum(values.gather(1, places), peak + log_total + _LEAST_LOGPROB)
        logprobs, ids = _kept(values, column, columns, least, peak, log_total)
        num_kept = (scores >= least).sum(1)
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
            _most=[number + _MOST_TIES for number in numbers],
        )

    def to_host(self) -> Iterator[tuple[int, list[tuple[int, float]]]]:
        """Yield each row's (id, logprob) pairs, most likely first; waits only for many ties."""
        looked_at = self._logprobs.shape[1]
        counts, logprobs, ids = self._num_kept.tolist(), self._logprobs.tolist(), self._ids.tolist()
        for place, row in enumerate(self.rows):
            if counts[place] > looked_at:
                yield row, self._with_many_ties(place)
                continue
            pairs = [pair for pair in zip(ids[place], logprobs[place], strict=True) if pair[1] > -math.inf]
            pairs.sort(key=lambda pair: (-pair[1], pair[0]))
            yield row, pairs[: self._most[place]]

    def _with_many_ties(self, place: int) -> list[tuple[int, float]]:
        """Return the pairs of one row, in the same order."""
        scores, one = self._scores[place], slice(place, place + 1)
        column = (scores >= self._least[place]).nonzero().squeeze(1)
        ids = column if self._columns is None else self._columns[place, column]
        ids, order = ids.sort()
        values, first = scores[column[order]].sort(descending=True, stable=True)
        most = self._most[place]
        logprobs = (values[None, :most] - self._peak[one]) - self._log_total[one]
        return list(zip(ids[first[:most]].tolist(), logprobs[0].tolist(), strict=True))


def _kept(
    values: Tensor, column: Tensor, columns: Tensor | None, least: Tensor, peak: Tensor, log_total: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log probabilities, -inf below `least`, and ids, [n, count]."""
    ids = column if columns is None else columns.gather(1, column)
    return (values.masked_fill(values < least, -math.inf) - peak) - log_total, ids
