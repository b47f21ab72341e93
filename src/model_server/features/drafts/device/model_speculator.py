"""Drafts by a computing drafter: their length, and when none; the rest by lookup."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.engine.steps.watcher import ComputedRow, ComputedStep
from model_server.features.drafts.device.speculator import STEPS, BatchWindows, DeviceSpeculator, KnownDrafts
from model_server.features.drafts.drafters.drafter import DraftedRunner, Drafter
from model_server.features.drafts.drafters.drafts import RowDrafts
from model_server.features.drafts.pace import LEAST_GAIN, Acceptance, Pace
from model_server.features.drafts.report import Drafted
from model_server.features.drafts.speculator import Compute, Draft, Drafting, foretold_after
from model_server.features.drafts.window import CheckedTokens, Window
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.runner import Kept, Runner
from wire.step_phases import DraftKind

# Where no drafts pay, windows with drafts of one token come back for as many steps as a decision holds, once in so many
# times those, and in at most this share of the time.
_LEAST_PAUSE = 32
_MOST_TIME = 0.01
# A drafter that has to see every step is given up for the present requests when it has not paid so often, or at once,
# where it would not pay for any of them alone either.
_MOST_LOOKS = 2
# Its first look comes after so many steps: waiting costs as much as its layer does in each.
_FIRST_PAUSE = 24
# Weight of the request that ended last in what is expected of the drafter for one that runs alone.
_ENDED_WEIGHT = 0.5


class DeviceModelSpeculator(DeviceSpeculator):
    """A `DeviceSpeculator` with a drafter, on GPUs and CPUs."""

    # Where the host makes the windows, drafts begin with what a grammar forces and what a prediction says.

    watches = True
    kind = DraftKind.MODEL

    def __init__(
        self, most: int, max_rows: int, device: torch.device, block_size: int, drafter: Drafter, *, alone: bool
    ) -> None:
        super().__init__(most, max_rows, device, block_size, alone=alone)
        self.drafter = drafter
        if device.type == "cpu":
            self._choices = list(range(1, most + 1))  # there are no graphs, which some lengths have
        # All ranks must expect the same, and those that run ahead have not seen the same steps when a request leaves.
        self._learns = alone or device.type == "cpu"
        self._undrafted = 0  # the host's steps without drafts since the last one with some
        self._given_up = 0  # steps for which a drafter that has to see every step was given up, since it was tried

    def measure(self, runner: Runner, cache: KvCache, world: ProcessGroup, max_length: int) -> None:
        inner = runner.inner if isinstance(runner, GraphedRunner) else runner
        assert isinstance(inner, DraftedRunner)
        self.drafter.measure(inner.drafters_part(cache), world)
        super().measure(runner, cache, world, max_length)

    def on_device(self, windows: BatchWindows | None, rows: list[Sequence]) -> bool:
        if windows is not None and windows.rest and windows.has_new(rows):
            windows.rest = 0
        return any(map(_can_draft, rows)) and super().on_device(windows, rows)

    def retains(self) -> Kept | None:
        return self.drafter.retains()

    def retains_plain(self, rows: list[Sequence]) -> Kept | None:
        """Return what plain steps keep; where drafts do not pay, not even a drafter that must see all."""
        if not self.drafter.is_lost_in_plain_steps or (self.on_host(rows) and any(map(_can_draft, rows))):
            return self.retains()
        self._given_up += 1
        self._give_up(rows)
        return None

    def on_step(self, rows: list[ComputedRow], step: ComputedStep) -> None:
        if step.kept is not None or not self.drafter.is_lost_in_plain_steps:
            self.drafter.on_step(rows, step)

    def note(self, window: Window, checked: CheckedTokens, step: ComputedStep) -> Drafted:
        drafted = super().note(window, checked, step)
        self.drafter.on_step(_accepted_rows(window, checked.to_host().counts or []), step)
        return drafted

    def note_ended(self, acceptance: Acceptance) -> None:
        """Expect of a drafter what it did before, as requests differ little."""
        if self._learns:
            self.first_share += _ENDED_WEIGHT * (acceptance.share - self.first_share)

    def _row_drafts(self, staging: Staging) -> RowDrafts:
        return self.drafter.start(staging)

    def _drafts(
        self, rows: list[Sequence], known: list[Drafting], pace: Pace, compute: Compute | None
    ) -> list[Draft] | None:
        drafts = [self._draft(sequence, drafting) for sequence, drafting in zip(rows, known, strict=True)]
        # What the drafter may add to a row's draft, by place.
        asked = [
            range(len(one.ids), self.longest(sequence) if one.others is DraftKind.MODEL else 0)
            for one, sequence in zip(drafts, rows, strict=True)
        ]
        lengths = [max(len(one.ids), places.stop) for one, places in zip(drafts, asked, strict=True)]
        shares = [one.acceptance.share for one in known]
        longest = self._best_length(drafts, asked, lengths, shares, pace)
        if not longest and self._is_hopeless(rows, shares):
            longest = self._look_or_give_up(rows)
        if not longest:
            return None
        if _asks(asked, longest):
            forced = np.full((len(rows), longest), -1, np.int64)
            for row, one in enumerate(drafts):
                forced[row, : len(one.ids)] = one.ids[:longest]
            assert compute is not None
            guessed = compute(rows, forced)
            drafts = [
                replace(one, ids=_possible(sequence, [*one.ids, *ids[places.start : places.stop]])) if places else one
                for one, sequence, places, ids in zip(drafts, rows, asked, guessed, strict=True)
            ]
        return [replace(one, ids=one.ids[:longest]) for one in drafts]

    def _best_length(
        self, drafts: list[Draft], asked: list[range], lengths: list[int], shares: list[float], pace: Pace
    ) -> int:
        """Return the host's draft length; now and then 1 where none pay."""
        count = len(lengths)
        longest = pace.best_length(
            lengths, [one.num_forced for one in drafts], shares, self._most_for(count),
            lambda length: self.drafter.seconds(count, length) if _asks(asked, length) else 0.0,
        )  # fmt: skip
        self._undrafted = 0 if longest else self._undrafted + 1
        if longest or not any(lengths) or not self._allowed(count) or self._undrafted < self._pause(count, 1) // STEPS:
            return longest
        self._undrafted = 0
        return 1

    def _follow(self, rows: list[Sequence]) -> list[Drafting]:
        present = {sequence.id for sequence in rows}
        for request_id, one in self.drafting.items():
            if request_id not in present:
                self.note_ended(one.acceptance)
        return super()._follow(rows)

    def _rest_after(self, num_rows: int) -> int:
        return 0  # `_best_length` pauses

    def _guess(
        self, sequence: Sequence, drafting: Drafting, most: int, forced: list[int]
    ) -> tuple[list[int], DraftKind]:
        """Leave to the drafter what is not foretold."""
        if self.drafter.pace is None or not _can_draft(sequence):
            return super()._guess(sequence, drafting, most, forced)
        foretold = foretold_after(sequence, drafting, most, forced).ids
        return foretold, DraftKind.PREDICTION if foretold else DraftKind.MODEL

    def _lengths(self, rows: list[Sequence], known: list[KnownDrafts]) -> list[float]:
        return [float(self.most) if _can_draft(one) else 0.0 for one in rows]

    def _gain(self, length: int, lengths: list[float], shares: list[float]) -> float:
        if self.pace is None or self.drafter.pace is None:
            return 0.0
        return self.pace.gain(length, lengths, shares, self.drafter.seconds(len(lengths), length))

    def _when_none_pays(self, windows: BatchWindows, rows: list[Sequence], *, is_new: bool, present: int) -> int:
        """Return 1 now and then, to see whether drafts would be right; plain steps are between."""
        allowed = self._allowed(len(rows))
        if self._is_hopeless(rows, [one.acceptance.share for one in windows.known(rows)]):
            return self._look_or_give_up(rows, tried=present > 0)
        if present or not allowed:
            return 0
        pause = self._pause(len(rows), allowed[0])
        if self.drafter.is_lost_in_plain_steps and not windows.looks:
            pause = _FIRST_PAUSE
        pause -= windows.undrafted
        if pause > 0:
            windows.rest = 0 if self.drafter.is_lost_in_plain_steps else pause
            return 0
        if self.drafter.is_lost_in_plain_steps and windows.looks >= _MOST_LOOKS:
            self._give_up(rows)
            return 0
        windows.looks += 1
        return allowed[0]

    def _is_hopeless(self, rows: list[Sequence], shares: list[float]) -> bool:
        """Whether a drafter that has to see every step, which costs time too, would not pay for any row alone."""
        if not self.drafter.is_lost_in_plain_steps or not self._allowed(len(rows)):
            return False
        return not any(
            self._gain(length, [float(self.most)], [share]) >= LEAST_GAIN
            for row, share in zip(rows, shares, strict=True)
            if _can_draft(row)
            for length in self._allowed(1)
        )

    def _look_or_give_up(self, rows: list[Sequence], *, tried: bool = False) -> int:
        """Return 1, to see whether drafts would be right, once in a pause; otherwise give the drafter up."""
        if not tried and any(map(_can_draft, rows)) and self._given_up >= self._pause(len(rows), 1):
            self._given_up = 0
            return 1
        self._give_up(rows)
        return 0

    def _pause(self, num_rows: int, length: int) -> int:
        """Steps between two looks."""
        assert self.pace is not None
        seconds = self.pace.cost(num_rows * (length + 1)) + self.drafter.seconds(num_rows, length)
        return STEPS * max(_LEAST_PAUSE, math.ceil((seconds / self.pace.cost(num_rows) - 1) / _MOST_TIME))

    @staticmethod
    def _give_up(rows: list[Sequence]) -> None:
        for sequence in rows:
            sequence.drafts_from = None


def _can_draft(sequence: Sequence) -> bool:
    """Whether a drafter knows enough of the request."""
    return sequence.drafts_from is not None


def _asks(asked: list[range], length: int) -> bool:
    """Whether drafts of `length` tokens have some that must be computed."""
    return any(len(range(places.start, min(length, places.stop))) > 0 for places in asked)


def _possible(sequence: Sequence, ids: list[int]) -> list[int]:
    """Return as many tokens as the grammar, if any, lets follow."""
    grammar = sequence.row.grammar
    return ids if grammar is None else grammar.possible(ids)


def _accepted_rows(window: Window, counts: list[int]) -> list[ComputedRow]:
    """Return what a window computed for good."""
    found, first = [], 0
    for sequence, draft, count in zip(window.rows, window.drafts, counts, strict=True):
        found.append(ComputedRow(sequence, sequence.cache_length, first, count, first + count - 1))
        first += 1 + len(draft)
    return found
