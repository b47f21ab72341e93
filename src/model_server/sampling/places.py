"""Rows at several places each: place j follows j draft tokens, which penalties and random numbers count on the
device.
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
    """What comes before each place, on the device."""

    # [num_rows, num_places] int64: tokens generated before.
    generated: Tensor
    # [num_rows, capacity] int32: tokens, then the draft.
    history: Tensor
    # [num_rows, num_places] int64: history before the place.
    lengths: Tensor
    # The host's bound of `lengths`.
    longest: int


def fits(row: SamplingRow) -> bool:
    """Whether `Places` is all that a row needs, unlike with grammars and watermarks."""
    return row.grammar is None and not row.parameters.watermark


class PlaceGroups(RowGroups):
    """Groups of `num_rows` * `num_places` rows, row by row."""

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
        """Group rows as `RowGroups`."""
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
        """Whether these groups are of these rows and places."""
        if num_places != self.num_places or len(rows) != len(self.batch):
            return False
        return all(map(operator.is_, self.batch, rows))

    def start(self, logits: Tensor, places: Places) -> Tensor | None:
        """Change logits before the temperature, and return random numbers as `next_uniforms`."""
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
    """`penalties.MinTokens` by counts on the device."""

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        barred = [(number, one) for number, row in enumerate(rows) if row.parameters.min_tokens for one in row.end_ids]
        self._index = upload(torch.tensor(barred, dtype=torch.int64).view(-1, 2), device).T
        least = [rows[number].parameters.min_tokens for number, _ in barred]
        self._least = upload(torch.tensor(least, dtype=torch.int64), device)

    def apply(self, logits: Tensor, generated: Tensor) -> None:
        """Change float32 [n, vocab] in place by generated [n] int64."""
        rows, columns = self._index
        is_short = generated.index_select(0, rows) < self._least
        logits[rows, columns] = logits[rows, columns].masked_fill(is_short, -torch.inf)


class PenaltiesAt:
    """`penalties.Penalties` over the rows' owner's histories."""

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
