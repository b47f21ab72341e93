"""Changes of logits before the temperature: watermark, penalties, bias, minimum length.

Tokens stay on the device, so that a step need not wait for the last ids. Only touched logits are read and written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from model_server.memory.transfer import upload
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.row import SamplingRow

_PADDING = -1
# What a repetition penalty may make of a logit: sums and differences of such values are numbers in float32.
_LIMIT = torch.finfo(torch.float32).max / 4
# TGI `utils/watermark.py`.
_HASH_KEY = 15485863


class PenaltyRules:
    """What rows are penalised by, apart from their tokens."""

    def __init__(
        self,
        parameters: Sequence[SamplingParameters],
        num_prompt: Sequence[int],
        vocab_size: int,
        device: torch.device,
        previous: PenaltyRules | None = None,
    ) -> None:
        """Lay out n rows; `previous` lends memory."""

        def column(values: list[float]) -> Tensor:
            return upload(torch.tensor(values, dtype=torch.float32)[:, None], device)

        self._repetition = column([p.repetition_penalty for p in parameters])
        self._frequency: Tensor | None = None
        self._presence: Tensor | None = None
        if any(p.frequency_penalty for p in parameters):
            self._frequency = column([p.frequency_penalty for p in parameters])
        if any(p.presence_penalty or p.absolute_frequency_penalty for p in parameters):
            self._presence = column([p.presence_penalty for p in parameters])
            self._absolute = column([p.absolute_frequency_penalty for p in parameters])
            self._num_prompt = upload(torch.tensor(num_prompt, dtype=torch.int64)[:, None], device)
        self._counts: Tensor | None = None  # [n or more, vocab], zeros between steps
        if self._frequency is not None or self._presence is not None:
            counts = None if previous is None else previous._counts
            if counts is None or len(counts) < len(parameters):
                counts = torch.zeros(len(parameters), vocab_size, device=device)
            self._counts = counts

    def apply(self, logits: Tensor, rows: Tensor, history: Tensor, lengths: Tensor) -> None:
        """Penalise `rows` [n, 1] of float32 [num_rows, vocab] in place.

        Args:
            history: [n, width] int64, of which `lengths` [n, 1] count; the rest repeats tokens.
        """
        # Repetition p (CTRL, Keskar et al. 2019), once per distinct id: x * p if x < 0 else x / p, but no further than
        # `_LIMIT` unless the model's own score is infinite. Frequency f (TGI): x - f * count / length, over all tokens.
        # Presence and absolute frequency (OpenAI), over generated tokens: x - presence * [count > 0] - absolute *
        # count.
        x = logits[rows, history]
        penalised = torch.where(x < 0, x * self._repetition, x / self._repetition).clamp_(-_LIMIT, _LIMIT)
        x = torch.where(x.isinf(), x, penalised)
        positions = torch.arange(history.shape[1], device=history.device)
        if self._frequency is not None:
            counts = self._count(history, positions < lengths)
            x -= counts / lengths * self._frequency
        if self._presence is not None:
            counts = self._count(history, (positions < lengths) & (positions >= self._num_prompt))
            x -= self._presence * (counts > 0) + self._absolute * counts
        logits[rows, history] = x

    def _count(self, history: Tensor, counted: Tensor) -> Tensor:
        """Count each position's token among `counted`; [n, length] float32."""
        assert self._counts is not None
        self._counts.scatter_add_(1, history, counted.to(torch.float32))
        counts = self._counts.gather(1, history)
        self._counts.scatter_(1, history, 0.0)
        return counts


class Penalties:
    """Penalties of rows, with their padded history [n, capacity] int64.

    Padding repeats the first token: writing twice is harmless. Rows' `views` go to the next layout in one copy.
    """

    def __init__(
        self,
        rows: Tensor,
        parameters: Sequence[SamplingParameters],
        histories: Sequence[Tensor],
        num_prompt: Sequence[int],
        vocab_size: int,
        room: int,
        previous: Penalties | None = None,
        places: Sequence[int] = (),
    ) -> None:
        """Lay out rows [n] int64.

        Args:
            histories: Ids so far; `num_prompt` of each are its prompt.
            room: Tokens before the next layout.
            places: Of rows in `previous`; -1: new.
        """
        device = rows.device
        lengths = [len(history) for history in histories]
        self._longest = max(lengths)
        self._capacity = self._longest + room
        if previous is None or max(places, default=-1) < 0:
            self._history = _laid_out(histories, self._capacity)
        else:
            self._history = previous._moved(histories, places, self._capacity)
        self._lengths = upload(torch.tensor(lengths, dtype=torch.int64)[:, None], device)
        self._rows = rows[:, None]
        self._rules: PenaltyRules = PenaltyRules(
            parameters, num_prompt, vocab_size, device, None if previous is None else previous._rules
        )

    @property
    def full(self) -> bool:
        """Whether there is no room for a token."""
        return self._longest >= self._capacity

    @property
    def views(self) -> list[Tensor]:
        """Return rows' histories, valid up to their owners' lengths."""
        return list(self._history)

    def apply(self, logits: Tensor) -> None:
        """In place, on float32 [num_rows, vocab]."""
        self._rules.apply(logits, self._rows, self._history[:, : self._longest], self._lengths)

    def append(self, ids: Tensor) -> None:
        """Append ids [num_rows] int64 of all rows."""
        self._history.scatter_(1, self._lengths, ids[self._rows])
        self._lengths += 1
        self._longest += 1

    def _moved(self, histories: Sequence[Tensor], places: Sequence[int], capacity: int) -> Tensor:
        """Copy histories at `places` together [n, capacity], new ones (-1) singly."""
        index = upload(torch.tensor(places, dtype=torch.int64).clamp_(min=0), self._history.device)
        moved = self._history.index_select(0, index)[:, :capacity]
        if (more := capacity - moved.shape[1]) > 0:
            moved = torch.cat((moved, moved[:, :1].expand(-1, more)), 1)
        moved = moved.contiguous()
        for row, (history, place) in enumerate(zip(histories, places, strict=True)):
            if place < 0:
                moved[row] = history[0]
                moved[row, : len(history)] = history
        return moved


def _laid_out(histories: Sequence[Tensor], capacity: int) -> Tensor:
    """[n, capacity]."""
    padded = pad_sequence(list(histories), batch_first=True, padding_value=_PADDING)
    padded = pad(padded, (0, capacity - padded.shape[1]), value=_PADDING)
    return torch.where(padded == _PADDING, padded[:, :1], padded)


class Adjustment(Protocol):
    """A change of logits by neither tokens nor grammar."""

    def apply(self, logits: Tensor) -> None:
        """Change float32 [num_rows, vocab] in place, once a step, before counting."""


def adjustments_of(rows: Sequence[SamplingRow], device: torch.device) -> list[Adjustment]:
    """Return the rows' adjustments in order."""
    adjustments: list[Adjustment] = []
    if any(row.parameters.logit_bias for row in rows):
        adjustments.append(LogitBias(rows, device))
    if any(row.parameters.min_tokens for row in rows):
        adjustments.append(MinTokens(rows, device))
    return adjustments


class LogitBias:
    """OpenAI's `logit_bias`."""

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        biases: dict[tuple[int, int], float] = {}
        for number, row in enumerate(rows):
            for token_id, bias in row.parameters.logit_bias:
                biases[number, token_id] = biases.get((number, token_id), 0.0) + bias
        self._index = upload(torch.tensor(list(biases), dtype=torch.int64), device).T  # [2, num_biases]
        self._bias = upload(torch.tensor(list(biases.values()), dtype=torch.float32), device)

    def apply(self, logits: Tensor) -> None:
        """In place, on float32 [num_rows, vocab]."""
        rows, columns = self._index
        logits[rows, columns] += self._bias


class MinTokens:
    """Delays ends until `min_tokens` (vLLM's), except in grammars."""

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        self._rows = [(n, row) for n, row in enumerate(rows) if row.grammar is None or row.grammar.is_asleep]
        self._device = device
        self._barred: list[tuple[int, int]] = []
        self._index = torch.empty(2, 0, dtype=torch.int64, device=device)

    def apply(self, logits: Tensor) -> None:
        """In place, on float32 [num_rows, vocab]."""
        short = [
            (number, row)
            for number, row in self._rows
            if row.num_generated < row.parameters.min_tokens and (row.grammar is None or row.grammar.is_asleep)
        ]
        barred = [(number, token_id) for number, row in short for token_id in row.end_ids]
        if barred != self._barred:
            self._barred = barred
            self._index = upload(torch.tensor(barred, dtype=torch.int64).view(-1, 2), self._device).T
        if barred:
            rows, columns = self._index
            logits[rows, columns] = -torch.inf


class Watermark:
    """Raises a "green" part of the vocabulary chosen by the last token (Kirchenbauer et al. 2023).

    As TGI's `utils/watermark.py`: torch's generator on the logits' device, seeded on the host, so rows wait for the
    last step.
    """

    def __init__(self, gamma: float, delta: float, device: torch.device) -> None:
        self._gamma = gamma
        self._delta = delta
        self._generator = torch.Generator(device=device)

    def apply(self, row: Tensor, last_id: int) -> None:
        """In place, on float32 [vocab]."""
        self._generator.manual_seed(_HASH_KEY * last_id)
        order = torch.randperm(len(row), device=row.device, generator=self._generator)
        row[order[: int(len(row) * self._gamma)]] += self._delta
