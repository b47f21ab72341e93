"""A step with prompts or chunks of them, beside rows that decode."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from model_server.batch.batch import Batch
from model_server.batch.decode_state import DecodeState
from model_server.batch.inputs import StepInputs, ragged_inputs
from model_server.batch.newest import NewestTokens
from model_server.batch.sequence import Sequence
from model_server.distributed.stage_links import Passage
from model_server.engine.calls import Session, StepCall
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.step import Step
from model_server.engine.steps.watcher import ragged_rows
from model_server.sampling.logprobs import prompt_scores


class RaggedStep(Step):
    """The planned part of each prompt and the next token of other rows; it plans the parts after these."""

    def __init__(
        self, context: StepContext, rows: list[Sequence], passage: Passage | None, times: StepTimes,
        batch: Batch, state: DecodeState, newest: NewestTokens | None, session: Session, call: StepCall,
    ) -> None:  # fmt: skip
        """Take the batch of `rows`; `newest`: its last sampled tokens, which the host may not have seen."""
        super().__init__(context, [s for s in rows if s.samples], passage, times)
        self._all_rows = rows
        self._batch = batch
        self._state = state
        self._newest = newest
        self._prefill_tokens = session.max_prefill_tokens
        self._chunk_tokens = call.chunk_tokens

    def inputs(self) -> StepInputs:
        rows, staging = self._all_rows, self.context.staging
        inputs = ragged_inputs(rows, self._state.tables, staging, self._newest)
        counts = inputs.model.attention.query_lengths_host
        return replace(inputs, model=self._state.extension.of(inputs.model, rows, counts, staging))

    def submit(self, previous: Step | None) -> None:
        watcher = self.context.watcher
        with self.context.phase("inputs"):
            inputs = self.inputs()
        kept = None if watcher is None else watcher.retains()
        logits = self.forward(inputs.model, kept)
        if self.passage is None or self.passage.is_last:
            _keep_prompt_scores(inputs, logits)
            if inputs.sampled_rows is not None:
                logits = logits.index_select(0, inputs.sampled_rows)
        if self.rows or self.passage is not None:
            self.sample(logits, previous)
        elif logits.is_cuda:
            # No caller waits for ids of this step; without this one, whole prompts would queue up on the device.
            torch.cuda.current_stream(logits.device).synchronize()
        if watcher is not None and watcher.watches:
            watcher.on_step(ragged_rows(self._all_rows, inputs), self.computed(inputs.model, kept))
        for sequence in self._all_rows:
            sequence.advance()
        self._batch.plan_chunks(self._prefill_tokens, self._chunk_tokens)


def _keep_prompt_scores(inputs: StepInputs, logits: Tensor) -> None:
    """Keep the scores of prompt tokens: row j scores token j + 1."""
    # They come with the first token, and are on the host by then: a download of its own would wait for queued steps.
    for part in inputs.scored:
        following = part.sequence.ids[part.position + 1 : part.position + 1 + part.count]
        rows = logits[part.first_row : part.first_row + part.count]
        part.sequence.prompt_scores.append(prompt_scores(rows, following, part.sequence.top_n_tokens))
