"""Drafts by a computing drafter on the device: their length, and when none; the rest by lookup."""

from __future__ import annotations

import math

import torch

from model_server.batch.results import Drafted
from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.runner import Kept, Runner
from model_server.speculation.device.drafters.drafter import DeviceDrafter
from model_server.speculation.device.speculator import STEPS, BatchWindows, DeviceSpeculator, KnownDrafts
from model_server.speculation.drafters.drafter import ComputedRow, ComputedStep, DraftedRunner
from model_server.speculation.model_speculator import accepted_rows
from model_server.speculation.window import CheckedTokens, Window
from wire.step_phases import DraftKind

# Where no drafts pay, windows with drafts of one token come back for as many steps as a decision holds, once in so many
# times those, and in at most this share of the time.
_LEAST_PAUSE = 32
_MOST_TIME = 0.01
# A drafter that has to see every step is given up for the present requests when it has not paid so often.
_MOST_LOOKS = 2


class DeviceModelSpeculator(DeviceSpeculator):
    """A `DeviceSpeculator` with a drafter."""

    watches = True

    def __init__(
        self, most: int, max_rows: int, device: torch.device, block_size: int, drafter: DeviceDrafter, *, alone: bool
    ) -> None:
        super().__init__(most, max_rows, device, block_size, alone=alone)
        self.drafter = drafter

    def measure(self, runner: Runner, cache: KvCache, world: ProcessGroup, max_length: int) -> None:
        inner = runner.inner if isinstance(runner, GraphedRunner) else runner
        assert isinstance(inner, DraftedRunner)
        self.drafter.measure(inner.drafters_part(cache), world)
        super().measure(runner, cache, world, max_length)

    def start(self, staging: Staging) -> BatchWindows:
        return BatchWindows(self._state(staging, self.drafter.start(staging)), DraftKind.MODEL)

    def on_device(self, windows: BatchWindows | None, rows: list[Sequence]) -> bool:
        return any(map(self.drafter.can_draft, rows)) and super().on_device(windows, rows)

    def retains(self) -> Kept | None:
        return self.drafter.retains()

    def retains_plain(self, rows: list[Sequence]) -> Kept | None:
        """Return what plain steps keep; where drafts do not pay, not even a drafter that must see all."""
        if not self.drafter.is_lost_in_plain_steps or self.on_host(rows):
            return self.retains()
        self._give_up(rows)
        return None

    def on_step(self, rows: list[ComputedRow], step: ComputedStep) -> None:
        if step.kept is not None or not self.drafter.is_lost_in_plain_steps:
            self.drafter.on_step(rows, step)

    def note(self, window: Window, checked: CheckedTokens, step: ComputedStep) -> Drafted:
        drafted = super().note(window, checked, step)
        self.drafter.on_step(accepted_rows(window, checked.to_host().counts or []), step)
        return drafted

    def _lengths(self, rows: list[Sequence], known: list[KnownDrafts]) -> list[float]:
        return [float(self.most) if self.drafter.can_draft(one) else 0.0 for one in rows]

    def _gain(self, length: int, lengths: list[float], shares: list[float]) -> float:
        if self.pace is None or not self.drafter.is_measured:
            return 0.0
        return self.pace.gain(length, lengths, shares, self.drafter.seconds(len(lengths), length))

    def _when_none_pays(self, windows: BatchWindows, rows: list[Sequence], *, is_new: bool, present: int) -> int:
        """Return 1 now and then, to see whether drafts would be right."""
        allowed = self._allowed(len(rows))
        if present or not allowed or windows.undrafted < self._pause(len(rows), allowed[0]):
            return 0
        if self.drafter.is_lost_in_plain_steps and windows.looks >= _MOST_LOOKS:
            self._give_up(rows)
            return 0
        windows.looks += 1
        return allowed[0]

    def _pause(self, num_rows: int, length: int) -> int:
        """Steps between two looks."""
        assert self.pace is not None
        seconds = self.pace.cost(num_rows * (length + 1)) + self.drafter.seconds(num_rows, length)
        return STEPS * max(_LEAST_PAUSE, math.ceil((seconds / self.pace.cost(num_rows) - 1) / _MOST_TIME))

    @staticmethod
    def _give_up(rows: list[Sequence]) -> None:
        for sequence in rows:
            sequence.drafts_from = None
