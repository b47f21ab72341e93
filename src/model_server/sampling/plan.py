"""Rows of one batch composition, sorted into groups that take the same path.

A plan is built when the composition changes and serves every step until the next change.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model_server.sampling.drawing import weight_bits
from model_server.sampling.filters import LARGEST_SELECTION, Filters
from model_server.sampling.grammar import GrammarMasks, GrammarState
from model_server.sampling.kernel_rows import KernelRows, fits
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.penalties import LogitBias, Penalties
from model_server.sampling.randomness import uniforms
from model_server.sampling.upload import upload

# Room for this many new tokens is made whenever the histories of a batch are laid out.
_GROWTH = 256
# Steps whose random numbers are made at once.
_STEPS_AHEAD = 16


class SamplingRow:
    """One request's sampling state. Lives as long as the request, through every change of its batch."""

    __slots__ = (
        "grammar",
        "history",
        "last_ids",
        "last_index",
        "max_new_tokens",
        "num_generated",
        "num_prompt",
        "parameters",
        "top_n_tokens",
    )

    def __init__(
        self,
        parameters: SamplingParameters,
        max_new_tokens: int,
        top_n_tokens: int,
        num_prompt: int,
        num_generated: int,
        grammar: GrammarState | None,
    ) -> None:
        self.parameters = parameters
        self.max_new_tokens = max_new_tokens
        self.top_n_tokens = top_n_tokens
        self.num_prompt = num_prompt
        self.num_generated = num_generated
        self.grammar = grammar
        # Ids so far, on the device, at least num_prompt + num_generated of them; only for rows with penalties.
        self.history: Tensor | None = None
        # Where the last id is; only for watermarked rows.
        self.last_ids: Tensor | None = None
        self.last_index = 0

    @classmethod
    def new(
        cls,
        parameters: SamplingParameters,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        top_n_tokens: int,
        num_generated: int,
        vocab_size: int,
        device: torch.device,
        grammar: GrammarState | None = None,
    ) -> SamplingRow:
        """ValueError: an id outside the vocabulary where the ids matter, or no prompt at all."""
        if not prompt_ids:
            raise ValueError("sampling needs at least one prompt token")
        outside = [token_id for token_id, _ in parameters.logit_bias if not 0 <= token_id < vocab_size]
        if outside:
            raise ValueError(f"logit_bias names token {outside[0]}, the vocabulary has {vocab_size}")
        row = cls(parameters, max_new_tokens, top_n_tokens, len(prompt_ids) - num_generated, num_generated, grammar)
        if parameters.penalises:
            if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
                raise ValueError(f"penalties need prompt ids inside the vocabulary of {vocab_size}")
            row.history = upload(torch.tensor(prompt_ids, dtype=torch.int64), device)
        if parameters.watermark:
            row.last_ids = torch.tensor(prompt_ids[-1:])
        return row

    @property
    def why_failed(self) -> str:
        """What to say when no token could be chosen."""
        if self.grammar is None:
            return "the model's scores for this request are not numbers"
        return self.grammar.error or "no token fits the grammar, or the model's scores for it are not numbers"

    def last_id(self) -> int:
        """The newest token; waits for it if the device has yet to choose it."""
        assert self.last_ids is not None
        return int(self.last_ids[self.last_index])


class GroupKind(enum.Enum):
    """Which path a group takes."""

    GREEDY = enum.auto()
    UNFILTERED = enum.auto()
    TOP_K = enum.auto()  # a few candidates are enough
    TOP_P = enum.auto()  # top-p or min-p without top-k: a few candidates are probably enough
    WHOLE = enum.auto()  # only whole rows will do


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that take the same path."""

    kind: GroupKind
    index: Tensor | slice  # [n] int64: its rows of the batch
    draws: Tensor | slice  # [n] int64: its entries of the step's uniforms
    filters: Filters | None  # None: greedy
    top: tuple[tuple[int, int, int], ...]  # (row of the group, row of the batch, top_n)

    def take(self, local: Tensor, num_rows: int) -> Group:
        """Some of its rows."""
        index = self.index
        if isinstance(index, slice):
            index = torch.arange(num_rows, device=local.device)[index]
        places = {row: place for place, row in enumerate(local.tolist())}
        top = tuple((places[row], batch_row, n) for row, batch_row, n in self.top if row in places)
        filters = None if self.filters is None else self.filters.take(local)
        return replace(self, index=index[local], filters=filters, top=top)


class Plan:
    """How to sample the given rows, as long as they are the batch."""

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        device: torch.device,
        most_rows: int,
        *,
        kernels: bool = False,
    ) -> None:
        """`most_rows`: how many whole rows are worked on at once. kernels: they take the rows that they can."""
        self.rows = tuple(rows)
        self._device = device
        parameters = [row.parameters for row in rows]
        taken = [number for number, row in enumerate(rows) if fits(row)] if kernels else []
        self.kernel_rows = (
            KernelRows([rows[n] for n in taken], taken, vocab_size, weight_bits(vocab_size), device) if taken else None
        )
        left = sorted(set(range(len(rows))).difference(taken))
        kinds = {number: _kind(parameters[number]) for number in left}
        drawn = [number for number, kind in kinds.items() if kind is not GroupKind.GREEDY]
        self.groups = []
        for kind in dict.fromkeys(kinds.values()):
            numbers = [number for number, of in kinds.items() if of is kind]
            # Selecting candidates reads each row once, all else works on whole rows.
            most = len(numbers) if kind is GroupKind.TOP_K and device.type == "cpu" else most_rows
            for start in range(0, len(numbers), most):
                self.groups.append(self._group(kind, numbers[start : start + most], drawn, vocab_size))
        self._seeds = np.array([parameters[number].seed for number in drawn], dtype=np.uint64)
        self._num_generated = np.array([rows[number].num_generated for number in drawn], dtype=np.uint64)
        # Random numbers of the coming steps, [steps, num_drawn, 1] float64 on the device: one upload for many.
        self._uniforms = torch.zeros(0)
        self._next_step = 0

        self.watermarked = [number for number, row in enumerate(parameters) if row.watermark]
        biased = [number for number, row in enumerate(parameters) if row.logit_bias]
        self.bias = LogitBias(biased, [parameters[n] for n in biased], device) if biased else None
        masked = [number for number, row in enumerate(rows) if row.grammar is not None]
        states = [row.grammar for row in rows if row.grammar is not None]
        self.masks = GrammarMasks(self._index(masked), states, device) if states else None
        self.penalties = self._penalties([n for n, row in enumerate(parameters) if row.penalises], vocab_size)

    @property
    def full(self) -> bool:
        """A new plan is needed although the rows are the same."""
        return self.penalties is not None and self.penalties.full

    def next_uniforms(self) -> Tensor | None:
        """This step's random numbers [num_drawn, 1] float64 on the device; None if nothing is drawn."""
        if not len(self._seeds):
            return None
        if self._next_step == len(self._uniforms):
            steps = np.arange(_STEPS_AHEAD, dtype=np.uint64)[:, None]
            numbers = uniforms(self._seeds[None], self._num_generated + steps)
            self._uniforms = upload(torch.from_numpy(numbers)[..., None], self._device)
            self._num_generated += np.uint64(_STEPS_AHEAD)
            self._next_step = 0
        self._next_step += 1
        return self._uniforms[self._next_step - 1]

    def advance(self, ids: Tensor) -> None:
        """Take the step's ids, [num_rows] int64 on the device, into every row's state."""
        for row in self.rows:
            row.num_generated += 1
        if self.penalties is not None:
            self.penalties.append(ids)
        for number in self.watermarked:
            self.rows[number].last_ids = ids
            self.rows[number].last_index = number

    def _group(self, kind: GroupKind, numbers: list[int], drawn: list[int], vocab_size: int) -> Group:
        members = set(numbers)
        draws = [place for place, number in enumerate(drawn) if number in members]
        parameters = [self.rows[number].parameters for number in numbers]
        return Group(
            kind=kind,
            index=self._index(numbers),
            draws=self._index(draws),
            filters=None if kind is GroupKind.GREEDY else Filters.of(parameters, vocab_size, self._device),
            top=tuple(
                (place, number, self.rows[number].top_n_tokens)
                for place, number in enumerate(numbers)
                if self.rows[number].top_n_tokens > 0
            ),
        )

    def _index(self, places: list[int]) -> Tensor | slice:
        """Neighbours as a slice: taking them costs no copy."""
        if not places or places[-1] - places[0] + 1 == len(places):
            return slice(places[0], places[-1] + 1) if places else slice(0)
        return upload(torch.tensor(places), self._device)

    def _penalties(self, numbers: list[int], vocab_size: int) -> Penalties | None:
        if not numbers:
            return None
        rows = [self.rows[number] for number in numbers]
        histories = []
        for row in rows:
            assert row.history is not None
            histories.append(row.history[: row.num_prompt + row.num_generated])
        penalties = Penalties(
            upload(torch.tensor(numbers), self._device),
            [row.parameters for row in rows],
            histories,
            [row.num_prompt for row in rows],
            vocab_size,
            room=max(1, min(_GROWTH, max(row.max_new_tokens - row.num_generated for row in rows))),
        )
        for row, view in zip(rows, penalties.views, strict=True):
            row.history = view
        return penalties


def _kind(row: SamplingParameters) -> GroupKind:
    if not row.samples:
        return GroupKind.GREEDY
    if not row.filters:
        return GroupKind.UNFILTERED
    if 0 < row.top_k <= LARGEST_SELECTION:
        return GroupKind.TOP_K
    return GroupKind.TOP_P if row.top_k == 0 and (row.top_p < 1.0 or row.min_p > 0.0) else GroupKind.WHOLE
