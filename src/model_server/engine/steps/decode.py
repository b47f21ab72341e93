"""A step of one token for each row."""

from __future__ import annotations

from model_server.batch.decode_state import DecodeState
from model_server.batch.newest import NewestTokens
from model_server.batch.results import Drafted
from model_server.batch.sequence import Sequence
from model_server.distributed.stage_links import Passage
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.step import Step
from model_server.runner.runner import ModelInputs
from model_server.sampling.sampler import HostSampled
from model_server.speculation.drafters.drafter import decoded_rows


class DecodeStep(Step):
    """The next token of each row, computed with the tensors of the decode step before."""

    def __init__(
        self, context: StepContext, rows: list[Sequence], passage: Passage | None, times: StepTimes,
        state: DecodeState, newest: NewestTokens | None, drafted: Drafted | None,
    ) -> None:  # fmt: skip
        """Take a batch's state.

        Args:
            newest: Its last sampled tokens, which the host may not have seen.
            drafted: That no draft paid, if drafts were looked for.
        """
        super().__init__(context, rows, passage, times)
        self._state = state
        self._newest = newest
        self._drafted = drafted

    def inputs(self) -> ModelInputs:
        return self._state.next(self.rows, self._newest)

    def submit(self, previous: Step | None) -> None:
        speculator = self.context.speculator
        with self.context.phase("inputs"):
            inputs = self.inputs()
        kept = None if speculator is None else speculator.retains_plain(self.rows)
        logits = self.forward(inputs, kept)
        self.sample(logits, previous)
        if speculator is not None and speculator.watches:
            speculator.on_step(decoded_rows(self.rows), self.computed(inputs, kept))
        for sequence in self.rows:
            sequence.advance()

    def accept(self, host: HostSampled) -> Drafted | None:
        return self._drafted
