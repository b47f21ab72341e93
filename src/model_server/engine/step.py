"""One step: the forward of a batch and its draws, put on the device without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_server.batch.batch import Batch
from model_server.batch.decode_state import DecodeState, Drawn
from model_server.batch.growth import Failure, Growth, grow, rows_without_room
from model_server.batch.inputs import StepInputs, ragged_inputs
from model_server.batch.results import Generation
from model_server.batch.sequence import Sequence
from model_server.batch.staging import Staging
from model_server.engine.profile import NoProfiler, StepProfiler
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import ModelInputs, Runner
from model_server.sampling.logprobs import prompt_logprobs
from model_server.sampling.sampler import Sampled, Sampler
from model_server.sampling.upload import upload


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device. `rows` are the sequences that draw a token in it, in the order of `sampled`; `refused`
    answers for requests that took no part in it."""

    batch: Batch
    started_ns: int = field(default_factory=time.time_ns)
    rows: list[Sequence] = field(default_factory=list)
    sampled: Sampled | None = None
    concat_ns: int | None = None
    refused: list[Generation] = field(default_factory=list)
    idle_ns: int = 0
    # When it began, its inputs were laid out, its forward was enqueued, its draws were; only the first without rows.
    marks: list[int] = field(default_factory=lambda: [time.perf_counter_ns()])


class Stepper:
    """Launches steps on one device. Not thread-safe: it belongs to the device thread."""

    def __init__(self, runner: Runner, sampler: Sampler, device: torch.device) -> None:
        self._runner = runner
        self._sampler = sampler
        self._device = device
        self._staging = Staging(device)
        self.profiler: StepProfiler | NoProfiler = NoProfiler()

    def grow(self, batch: Batch, growth: Rows[Growth], cache: KvCache, *, numbered: bool, grows: bool) -> list[Failure]:
        """Give running requests their blocks; the rows that cannot take part in the next step, and why.

        grows: rows may be short of blocks. Raises RequestError for growth of an unknown request without a number.
        """
        failures = grow(batch, growth, cache, numbered=numbered) if growth else []
        if grows and (failures or not goes_on(batch)):
            failures += rows_without_room(batch)
        return failures

    def launch(
        self,
        step: LaunchedStep,
        cache: KvCache,
        max_prefill_tokens: int,
        *,
        chunk_tokens: int | None,
        some_failed: bool,
    ) -> None:
        """Enqueue the next forward of the step's batch, and its draws. Without rows nothing is done.

        max_prefill_tokens, chunk_tokens: bound what the forward after this one computes, see `Batch.plan_chunks`.
        some_failed: rows of the batch have ended since the last step.
        """
        batch = step.batch
        rows = batch.sequences
        if some_failed or not goes_on(batch):
            rows = [s for s in rows if not (s.is_exhausted or s.finished)]
            if len(rows) == len(batch.sequences):
                rows = batch.sequences  # the list itself: by that the state knows its rows
        if not rows:
            return
        if batch.is_prefilling:
            self._run_ragged(step, rows, cache)
            batch.plan_chunks(max_prefill_tokens, chunk_tokens)
            return
        if batch.decode is None:
            batch.decode = DecodeState(self._device, cache.block_size, self._staging)
        with self.profiler.phase("inputs"):
            inputs = batch.decode.next(rows, batch.drawn)
        logits = self._forward(step, inputs, cache)
        self._draw(step, rows, logits)
        for sequence in rows:
            sequence.advance()

    def _run_ragged(self, step: LaunchedStep, rows: list[Sequence], cache: KvCache) -> None:
        """One forward of prompts, chunks and decode rows."""
        assert not any(s.is_behind for s in rows), "launched ahead of a step whose ids it needs"
        batch = step.batch
        with self.profiler.phase("inputs"):
            inputs = ragged_inputs(rows, batch.block_tables(rows), self._staging)
        if batch.decode is not None:
            batch.decode.note_other_step()
        logits = self._forward(step, inputs.model, cache)
        _keep_prompt_logprobs(inputs, logits)
        if inputs.drawn_rows is not None:
            logits = logits.index_select(0, inputs.drawn_rows)
        drawing = [s for s in rows if s.draws]
        if drawing:
            self._draw(step, drawing, logits)
        elif logits.is_cuda:
            # Nobody waits for ids of this step; without this one, whole prompts would queue up on the device.
            torch.cuda.current_stream(logits.device).synchronize()
        for sequence in rows:
            sequence.advance()

    def _forward(self, step: LaunchedStep, inputs: ModelInputs, cache: KvCache) -> Tensor:
        step.marks.append(time.perf_counter_ns())
        with self.profiler.phase("forward"):
            logits = self._runner.forward(inputs, cache)
        step.marks.append(time.perf_counter_ns())
        return logits

    def _draw(self, step: LaunchedStep, rows: list[Sequence], logits: Tensor) -> None:
        with self.profiler.phase("sampling"):
            step.rows, step.sampled = rows, self._sampler.sample(logits, [s.row for s in rows])
        step.marks.append(time.perf_counter_ns())
        step.batch.launched = step
        step.batch.drawn = Drawn(rows, step.sampled.ids)


def goes_on(batch: Batch) -> bool:
    """The batch may take a decode step with the rows of the last one: all have tokens left and room for them."""
    return batch.decode is not None and batch.decode.goes_on_with(batch.sequences)


def _keep_prompt_logprobs(inputs: StepInputs, logits: Tensor) -> None:
    """Row j of a prompt's logits scores its token j + 1; the logprobs are delivered with the request's first token."""
    for part in inputs.scored:
        following = part.sequence.ids[part.position + 1 : part.position + 1 + part.count]
        ids = upload(torch.tensor(following, dtype=torch.int64), logits.device)
        scores = logits[part.first_row : part.first_row + part.count]
        part.sequence.prompt_logprobs.append(prompt_logprobs(scores, ids))
