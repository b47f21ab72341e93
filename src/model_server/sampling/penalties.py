"""Changes of logits before the temperature: watermark, penalties, logit bias, minimum length.

The tokens so far stay on the device, so that a step can be sampled before the ids of the step before it are known to
the host. Only touched logits are read and written; rows that do not ask for a change are not touched at all.
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
        """Of n rows. num_prompt: how many of a row's tokens are its prompt. previous: whose memory may be used."""

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
        """In place, on float32 [num_rows, vocab], of which `rows` [n, 1] int64 are penalised. history: [n, width]
        int64, of which `lengths` [n, 1] int64 count and the rest is tokens of the row again.

        Repetition p (CTRL, Keskar et al. 2019), once per distinct id: x * p if x < 0 else x / p, but no further than
        `_LIMIT` unless the model's own score is infinite. Frequency f (TGI): x - f * count / length, over prompt and
        generated tokens. Presence and absolute frequency (OpenAI), over generated tokens: x - presence * [count > 0] -
        absolute * count.
        """
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
        """How often the token at each position occurs among the positions `counted`; [n, length] float32."""
        assert self._counts is not None
        self._counts.scatter_add_(1, history, counted.to(torch.float32))
        counts = self._counts.gather(1, history)
        self._counts.scatter_(1, history, 0.0)
        return counts


class Penalties:
    """Repetition, frequency and presence penalties of the rows that ask for them.

    Owns the padded history [n, capacity] int64. A row's own view of it (`views`) is handed to the next layout when the
    batch changes. Past its end a history is filled with its first token: touching a token twice writes one value twice.
    What a new layout finds in the one before it, it takes from there in one copy.
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
        """`rows` [n] int64: which logits rows; `histories`: ids so far, each 1-D int64; `num_prompt`: its prompt part.

        `room`: how many tokens may come before a new layout is needed. places: where `previous` has each row; -1: it
        has not.
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
        """No room for another token: lay out again."""
        return self._longest >= self._capacity

    @property
    def views(self) -> list[Tensor]:
        """Each row's history; valid up to the length its owner knows."""
        return list(self._history)

    def apply(self, logits: Tensor) -> None:
        """In place, on float32 [num_rows, vocab]."""
        self._rules.apply(logits, self._rows, self._history[:, : self._longest], self._lengths)

    def append(self, ids: Tensor) -> None:
        """Take the new ids of all rows of the batch, [num_rows] int64."""
        self._history.scatter_(1, self._lengths, ids[self._rows])
        self._lengths += 1
        self._longest += 1

    def _moved(self, histories: Sequence[Tensor], places: Sequence[int], capacity: int) -> Tensor:
        """The histories at `places` in one copy [n, capacity], and the new ones (-1) one by one."""
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
    """A change of some rows' logits that looks neither at their tokens nor at a grammar."""

    def apply(self, logits: Tensor) -> None:
        """In place, on float32 [num_rows, vocab]. Called once for each step, before its tokens are counted."""


def adjustments_of(rows: Sequence[SamplingRow], device: torch.device) -> list[Adjustment]:
    """Those that some of the rows of a batch ask for, in the order in which they are applied."""
    adjustments: list[Adjustment] = []
    if any(row.parameters.logit_bias for row in rows):
        adjustments.append(LogitBias(rows, device))
    if any(row.parameters.min_tokens for row in rows):
        adjustments.append(MinTokens(rows, device))
    return adjustments


class LogitBias:
    """Adds each row's biases to its logits (OpenAI's `logit_bias`)."""

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
    """Keeps answers from ending before they have `min_tokens` tokens (vLLM's). A grammar's text ends where it must."""

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
    """Raises the logits of a pseudo-random "green" part of the vocabulary chosen by the last token.

    Kirchenbauer et al. 2023, as TGI's `utils/watermark.py`, whose generator it keeps: torch's, on the logits' device,
    seeded with the last id. The seed is needed on the host, so these rows wait for the step before.
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
