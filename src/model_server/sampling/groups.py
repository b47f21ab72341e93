"""Rows of one composition in groups of equal path, made when it changes."""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from model_server.memory.transfer import Staging, upload
from model_server.sampling.categorical import uniforms, weight_bits
from model_server.sampling.filters import LARGEST_SELECTION, Filters
from model_server.sampling.grammars.masks import GrammarMasks
from model_server.sampling.kernel_rows import KernelRows, fits
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.penalties import Penalties, adjustments_of
from model_server.sampling.row import SamplingRow

# Room for this many new tokens is made whenever the histories of a batch are laid out.
_GROWTH = 256
# Steps whose random numbers are made at once.
_STEPS_AHEAD = 16


class GroupKind(enum.Enum):
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
    uniforms: Tensor | slice  # [n] int64: its entries of the step's uniforms
    filters: Filters | None  # None: greedy
    top: tuple[tuple[int, int, int], ...]  # (row of the group, row of the batch, top_n)

    def select(self, local: Tensor, num_rows: int) -> Group:
        """Some of its rows."""
        index = self.index
        if isinstance(index, slice):
            index = torch.arange(num_rows, device=local.device)[index]
        places = {row: place for place, row in enumerate(local.tolist())}
        top = tuple((places[row], batch_row, n) for row, batch_row, n in self.top if row in places)
        filters = None if self.filters is None else self.filters.select(local)
        return replace(self, index=index[local], filters=filters, top=top)


class RowGroups:
    """A batch's rows in groups, and what their steps need."""

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        vocab_size: int,
        device: torch.device,
        most_rows: int,
        *,
        kernels: bool = False,
        staging: Staging | None = None,
        previous: RowGroups | None = None,
    ) -> None:
        """Group the rows.

        Args:
            most_rows: Whole rows worked on at once.
            kernels: Take the rows that they can.
            previous: Groups of the composition before, reused where they hold.
        """
        self.rows = tuple(rows)
        self._device = device
        parameters = [row.parameters for row in rows]
        taken = [number for number, row in enumerate(rows) if fits(row)] if kernels else []
        self.kernel_rows: KernelRows | None = None
        if taken:
            self.kernel_rows = KernelRows(
                [rows[n] for n in taken],
                taken,
                vocab_size,
                weight_bits(vocab_size),
                staging or Staging(device),
                None if previous is None else previous.kernel_rows,
            )
        left = sorted(set(range(len(rows))).difference(taken))
        kinds = {number: _kind(parameters[number]) for number in left}
        sampled = [number for number, kind in kinds.items() if kind is not GroupKind.GREEDY]
        self.groups = []
        for kind in dict.fromkeys(kinds.values()):
            numbers = [number for number, of in kinds.items() if of is kind]
            # Selecting candidates reads each row once, all else works on whole rows.
            most = len(numbers) if kind is GroupKind.TOP_K and device.type == "cpu" else most_rows
            for start in range(0, len(numbers), most):
                self.groups.append(self._group(kind, numbers[start : start + most], sampled, vocab_size))
        self._sampled = sampled
        self._seeds = np.array([parameters[number].seed for number in sampled], dtype=np.uint64)
        self._num_generated = np.array([rows[number].num_generated for number in sampled], dtype=np.uint64)
        # Random numbers of the coming steps, [steps, num_sampled, 1] float64 on the device: one upload for many.
        self._uniforms = torch.zeros(0)
        self._next_step = 0

        self.watermarked = [number for number, row in enumerate(parameters) if row.watermark]
        self.adjustments = adjustments_of(self.rows, device)
        masked = [number for number, row in enumerate(rows) if row.grammar is not None]
        states = [row.grammar for row in rows if row.grammar is not None]
        self.masks = GrammarMasks(self._index(masked), states, device) if states else None
        self._penalised: dict[SamplingRow, int] = {}  # where `penalties` has them
        penalised = [number for number, row in enumerate(parameters) if row.penalises]
        self.penalties = self._penalties_of(penalised, vocab_size, previous)

    def serve(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether these groups are of these rows, with room for a token."""
        if self.penalties is not None and self.penalties.full:
            return False
        return len(self.rows) == len(rows) and all(map(operator.is_, self.rows, rows))

    def next_uniforms(self) -> Tensor | None:
        """Return random numbers [num_sampled, 1] float64, if any are needed."""
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
        """Take the ids [num_rows] int64 into every row's state."""
        for row in self.rows:
            row.num_generated += 1
        if self.penalties is not None:
            self.penalties.append(ids)
        for number in self.watermarked:
            self.rows[number].last_ids = ids
            self.rows[number].last_index = number

    def _group(self, kind: GroupKind, numbers: list[int], sampled: list[int], vocab_size: int) -> Group:
        members = set(numbers)
        places = [place for place, number in enumerate(sampled) if number in members]
        parameters = [self.rows[number].parameters for number in numbers]
        return Group(
            kind=kind,
            index=self._index(numbers),
            uniforms=self._index(places),
            filters=None if kind is GroupKind.GREEDY else Filters.of(parameters, vocab_size, self._device),
            top=tuple(
                (place, number, self.rows[number].top_n_tokens)
                for place, number in enumerate(numbers)
                if self.rows[number].top_n_tokens > 0
            ),
        )

    def _index(self, places: list[int]) -> Tensor | slice:
        """Return a slice if consecutive, which costs no copy."""
        if not places or places[-1] - places[0] + 1 == len(places):
            return slice(places[0], places[-1] + 1) if places else slice(0)
        return upload(torch.tensor(places), self._device)

    def _penalties_of(self, numbers: list[int], vocab_size: int, previous: RowGroups | None) -> Penalties | None:
        if not numbers:
            return None
        rows = [self.rows[number] for number in numbers]
        self._penalised = {row: place for place, row in enumerate(rows)}
        known = {} if previous is None else previous._penalised
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
            previous=None if previous is None else previous.penalties,
            places=[known.get(row, -1) for row in rows],
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
