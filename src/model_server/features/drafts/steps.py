"""A batch's steps with drafts: one forward over each row's newest token and its draft."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import numpy.typing as npt

from model_server.batch.decode_state import DecodeState
from model_server.batch.newest import NewestTokens
from model_server.batch.sequence import Sequence
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.maker import StepMaker
from model_server.engine.steps.step import Step
from model_server.features.drafts.device.speculator import BatchWindows, DeviceSpeculator
from model_server.features.drafts.device.tokens import WindowTokens
from model_server.features.drafts.report import NOTHING_DRAFTED, Drafted
from model_server.features.drafts.speculator import Speculator
from model_server.features.drafts.window import Window
from model_server.runner.runner import ModelInputs
from model_server.sampling.sampler import HostSampled


def drafts_by(speculator: Speculator) -> StepMaker:
    """Return what makes steps with the drafts of `speculator`."""
    return StepMaker(speculator, partial(DraftedSteps, speculator))


class DraftedSteps:
    """A `BatchSteps`: windows that the host makes, or the device."""

    def __init__(self, speculator: Speculator, context: StepContext, decode: DecodeState) -> None:
        self.reports: tuple[object, ...] = ()
        # Of drafts that the device makes, if any.
        self.windows: BatchWindows | None = None
        self._speculator = speculator
        self._context = context
        self._decode = decode

    @property
    def has_run(self) -> bool:
        return self.windows is not None

    @property
    def has_open_window(self) -> bool:
        """Whether the host does not know rows' token counts yet; only a window of these can follow."""
        return self.windows is not None and self.windows.unseen > 0

    def may_follow(self, rows: list[Sequence]) -> bool:
        speculator = self._speculator
        if not isinstance(speculator, DeviceSpeculator):
            return True
        if rows:
            if speculator.on_host(rows):
                return False
            if self.windows is not None and self.has_open_window:
                return speculator.on_device(self.windows, rows) and self.windows.state.can_go_on(rows)
        return not self.has_open_window

    def next(self, rows: list[Sequence], times: StepTimes, newest: NewestTokens | None) -> Step | None:
        speculator, context = self._speculator, self._context
        self.reports = ()
        if isinstance(speculator, DeviceSpeculator) and speculator.on_device(self.windows, rows):
            windows = self._device_windows(speculator)
            return DeviceVerifyStep(context, rows, times, speculator, windows, self._decode, newest)
        if not any(s.has_unseen for s in rows):
            compute = partial(self._guess, speculator) if isinstance(speculator, DeviceSpeculator) else None
            with context.phase("drafting"), times.guessing():
                window = speculator.window(rows, compute)
            if window is not None:
                self.note_other_step()
                return VerifyStep(context, times, speculator, window, self._decode)
            self.reports = (NOTHING_DRAFTED,)
        self.note_other_step()
        if self.windows is not None:
            self.windows.rested()
        return None

    def note_other_step(self) -> None:
        if self.windows is not None:
            self.windows.state.note_other_step()

    def release(self, kept: list[Sequence]) -> None:
        if self.windows is not None:
            self.windows.release(kept)

    def _guess(
        self, speculator: DeviceSpeculator, rows: list[Sequence], forced: npt.NDArray[np.int64]
    ) -> list[list[int]]:
        return self._device_windows(speculator).state.guess(rows, forced)

    def _device_windows(self, speculator: DeviceSpeculator) -> BatchWindows:
        if self.windows is None:
            self.windows = speculator.start(self._context.staging, self._decode.tables)
        return self.windows


class VerifyStep(Step):
    """Checks drafts that the host made, and waits for the tokens: their number decides the next step."""

    decides_next = True

    def __init__(
        self, context: StepContext, times: StepTimes,
        speculator: Speculator, window: Window, state: DecodeState,
    ) -> None:  # fmt: skip
        super().__init__(context, window.rows, None, times)
        self._speculator = speculator
        self._window = window
        self._state = state
        self._drafted: Drafted | None = None

    def inputs(self) -> ModelInputs:
        window, staging = self._window, self.context.staging
        counts = [1 + len(draft) for draft in window.drafts]
        return self._state.extension.of(window.inputs(self._state.tables, staging), window.rows, counts, staging)

    def submit(self, previous: Step | None) -> None:
        with self.context.phase("inputs"):
            inputs = self.inputs()
        kept = self._speculator.retains()
        logits = self.forward(inputs, kept)
        with self.context.phase("sampling"):
            self.sampled = checked = self._window.check(logits, self.context.sampler)
        self.times.sampled = time.perf_counter_ns()
        self._drafted = self._speculator.note(self._window, checked, self.computed(inputs, kept))
        for sequence in self.rows:
            sequence.advance()

    def accept(self, host: HostSampled) -> tuple[object, ...]:
        _accept_counts(self.rows, host)
        return (self._drafted,)


class DeviceVerifyStep(Step):
    """Checks drafts that the device made, and has it draft for the next step; waits for nothing."""

    def __init__(
        self, context: StepContext, rows: list[Sequence], times: StepTimes,
        speculator: DeviceSpeculator, windows: BatchWindows, state: DecodeState, newest: NewestTokens | None,
    ) -> None:  # fmt: skip
        """Take a batch's drafts, and its last sampled tokens, which the host may not have seen."""
        super().__init__(context, rows, None, times)
        self._speculator = speculator
        self._windows = windows
        self._state = state
        self._newest = newest
        self._length = speculator.length(windows, rows)

    def inputs(self) -> ModelInputs:
        windows = self._windows.state
        with self.times.guessing():
            windows.start(self.rows, self._newest, self._windows.unseen)
            inputs = windows.inputs(self._length)
        return self._state.extension.of_rows(inputs, self.rows, self._length + 1, self.context.staging)

    def submit(self, previous: Step | None) -> None:
        speculator, windows, length = self._speculator, self._windows, self._length
        with self.context.phase("inputs"):
            inputs = self.inputs()
        kept = speculator.retains()
        logits = self.forward(inputs, kept)
        with self.context.phase("sampling"):
            state = windows.state
            chosen = self.context.sampler.sample_places(logits, [s.row for s in self.rows], state.places(length))
            checked = state.accept(length, chosen.ids, chosen.packed, kept)
            self.sampled = self._tokens = WindowTokens(checked, length, chosen.top)
        self.times.sampled = time.perf_counter_ns()
        windows.submitted(self.rows, length)
        # Other ranks take the same decisions from what all of them have seen.
        self.decides_next = not speculator.alone and (length > 0 or speculator.is_due(windows))
        for sequence in self.rows:
            sequence.advance()

    def accept(self, host: HostSampled) -> tuple[object, ...]:
        _accept_counts(self.rows, host)
        return (self._windows.seen(self.rows, self._tokens, self._length),)


def _accept_counts(rows: list[Sequence], host: HostSampled) -> None:
    """Move the rows on by what they got beyond one token."""
    assert host.counts is not None
    for sequence, count in zip(rows, host.counts, strict=True):
        sequence.accept(count - 1)
