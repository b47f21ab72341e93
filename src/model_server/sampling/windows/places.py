"""The rows of a batch, each at several places one after the other, as the sampler takes them.

Place j of a row has the row's tokens and the first j of its draft before it: penalties look at these, and the random
number is that of as many generated tokens. How many those are only the device knows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_server.memory.transfer import Staging, upload
from model_server.sampling.categorical import device_uniforms
from model_server.sampling.groups import RowGroups
from model_server.sampling.penalties import LogitBias, PenaltyRules
from model_server.sampling.row import SamplingRow

# What penalties make of each token of a history at each place: it and a copy in int64, and whether it counts.
PENALTY_BYTES = 17


@dataclass(frozen=True, slots=True)
class Places:
    """What comes before each place of a step, on the device.

    generated: [num_rows, num_places] int64, tokens that were generated before the place. history: [num_rows, capacity]
    int32, a row's tokens and its draft behind them. lengths: [num_rows, num_places] int64, how many tokens of the
    history are before the place. longest: the host's upper bound of `lengths`.
    """

    generated: Tensor
    history: Tensor
    lengths: Tensor
    longest: int


def fits(row: SamplingRow) -> bool:
    """Whether all that a row asks for follows from `Places`: a grammar and a watermark need the host."""
    return row.grammar is None and not row.parameters.watermark


class PlaceGroups(RowGroups):
    """Groups of `num_rows` * `num_places` rows, place after place of one row after the other."""

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        num_places: int,
        vocab_size: int,
        device: torch.device,
        most_rows: int,
        *,
        kernels: bool,
        staging: Staging,
    ) -> None:
        """rows: those that `fits`. The rest as in `RowGroups`."""
        self.batch = tuple(rows)
        self.num_places = num_places
        placed = [row for row in rows for _ in range(num_places)]
        super().__init__(placed, vocab_size, device, most_rows, kernels=kernels, staging=staging)
        self.adjustments = [LogitBias(placed, device)] if any(row.parameters.logit_bias for row in rows) else []
        self._min_tokens = MinTokensAt(placed, device) if any(row.parameters.min_tokens for row in rows) else None
        self._seeds_on_device = upload(torch.from_numpy(self._seeds.view(np.int64))[:, None], device)
        self._sampled_on_device = upload(torch.tensor(self._sampled, dtype=torch.int64), device)
        penalised = [number for number, row in enumerate(rows) if row.parameters.penalises]
        self._penalties = PenaltiesAt(penalised, rows, num_places, vocab_size, device) if penalised else None

    def serve_places(self, rows: Sequence[SamplingRow], num_places: int) -> bool:
        """Whether these are the groups of just these rows and places."""
        if num_places != self.num_places or len(rows) != len(self.batch):
            return False
        return all(map(operator.is_, self.batch, rows))

    def begin(self, logits: Tensor, places: Places) -> Tensor | None:
        """Change what is changed before the temperature, in place; the random numbers as of `next_uniforms`."""
        generated = places.generated.reshape(-1)
        if self._penalties is not None:
            self._penalties.apply(logits, places)
        for adjustment in self.adjustments:
            adjustment.apply(logits)
        if self._min_tokens is not None:
            self._min_tokens.apply(logits, generated)
        if self.kernel_rows is not None:
            self.kernel_rows.count_from(generated)
        if not self._sampled:
            return None
        counts = generated.index_select(0, self._sampled_on_device)[:, None]
        return device_uniforms(self._seeds_on_device, counts)

    def _penalties_of(self, numbers: list[int], vocab_size: int, previous: RowGroups | None) -> None:
        """Histories are not the sampler's here."""


class MinTokensAt:
    """As `penalties.MinTokens`, where only the device knows how many tokens were generated."""

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        barred = [(number, one) for number, row in enumerate(rows) if row.parameters.min_tokens for one in row.end_ids]
        self._index = upload(torch.tensor(barred, dtype=torch.int64).view(-1, 2), device).T
        least = [rows[number].parameters.min_tokens for number, _ in barred]
        self._least = upload(torch.tensor(least, dtype=torch.int64), device)

    def apply(self, logits: Tensor, generated: Tensor) -> None:
        """In place, on float32 [n, vocab]. generated: [n] int64."""
        rows, columns = self._index
        is_short = generated.index_select(0, rows) < self._least
        logits[rows, columns] = logits[rows, columns].masked_fill(is_short, -torch.inf)


class PenaltiesAt:
    """As `penalties.Penalties`, with histories that are the owner's of the rows."""

    def __init__(
        self,
        numbers: list[int],
        rows: Sequence[SamplingRow],
        num_places: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """numbers: which of `rows` are penalised."""
        placed = [number for number in numbers for _ in range(num_places)]
        self._numbers = upload(torch.tensor(placed), device)
        firsts = torch.tensor(numbers)[:, None] * num_places + torch.arange(num_places)
        self._rows = upload(firsts.reshape(-1), device)
        self._rules = PenaltyRules(
            [rows[number].parameters for number in placed],
            [rows[number].num_prompt for number in placed],
            vocab_size,
            device,
        )

    def apply(self, logits: Tensor, places: Places) -> None:
        """In place, on float32 [n, vocab]."""
        history = places.history[:, : places.longest].index_select(0, self._numbers).long()
        lengths = places.lengths.reshape(-1).index_select(0, self._rows)[:, None]
        inside = torch.arange(history.shape[1], device=history.device) < lengths
        history = torch.where(inside, history, history[:, :1])
        self._rules.apply(logits, self._rows[:, None], history, lengths)
