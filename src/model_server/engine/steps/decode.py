"""A step of one token for each row."""

from __future__ import annotations

from model_server.batch.decode_state import DecodeState
from model_server.batch.newest import NewestTokens
from model_server.batch.sequence import Sequence
from model_server.distributed.stage_links import Passage
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.step import Step
from model_server.engine.steps.watcher import decoded_rows
from model_server.runner.runner import ModelInputs
from model_server.sampling.sampler import HostSampled


class DecodeStep(Step):
    """The next token of each row, computed with the tensors of the decode step before."""

    def __init__(
        self, context: StepContext, rows: list[Sequence], passage: Passage | None, times: StepTimes,
        state: DecodeState, newest: NewestTokens | None, reports: tuple[object, ...] = (),
    ) -> None:  # fmt: skip
        """Take a batch's state.

        Args:
            newest: Its last sampled tokens, which the host may not have seen.
            reports: Of a feature that made no step in its place.
        """
        super().__init__(context, rows, passage, times)
        self._state = state
        self._newest = newest
        self._reports = reports

    def inputs(self) -> ModelInputs:
        return self._state.next(self.rows, self._newest)

    def submit(self, previous: Step | None) -> None:
        watcher = self.context.watcher
        with self.context.phase("inputs"):
            inputs = self.inputs()
        kept = None if watcher is None else watcher.retains_plain(self.rows)
        logits = self.forward(inputs, kept)
        self.sample(logits, previous)
        if watcher is not None and watcher.watches:
            watcher.on_step(decoded_rows(self.rows), self.computed(inputs, kept))
        for sequence in self.rows:
            sequence.advance()

    def accept(self, host: HostSampled) -> tuple[object, ...]:
        return self._reports
