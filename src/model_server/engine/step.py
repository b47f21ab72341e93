"""One step: a batch's forward and sampling, put on the device without waiting."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch
from torch import Tensor

from model_server.batch.batch import Batch
from model_server.batch.decode_state import DecodeState
from model_server.batch.growth import Failure, append_blocks, rows_without_slots
from model_server.batch.images import encode_images
from model_server.batch.inputs import StepInputs, ragged_inputs
from model_server.batch.newest import NewestTokens
from model_server.batch.results import NOTHING_DRAFTED
from model_server.batch.sequence import Sequence
from model_server.distributed.stage_links import StageLinks
from model_server.engine.calls import PrefillCall, Session, StepCall
from model_server.engine.profile import NoProfiler, StepProfiler
from model_server.engine.running import AwaitedTokens, Running, SubmittedStep
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.runner import Kept, ModelInputs, Runner
from model_server.sampling.logprobs import prompt_scores
from model_server.sampling.sampler import Sampler
from model_server.speculation.device.speculator import DeviceSpeculator
from model_server.speculation.device.tokens import WindowTokens
from model_server.speculation.drafters.drafter import ComputedStep, decoded_rows, ragged_rows
from model_server.speculation.speculator import Speculator
from model_server.speculation.window import Window
from model_server.vision.encoder import ImageEncoder


class Stepper:
    """Submits steps to one device, on the device thread."""

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        device: torch.device,
        block_size: int,
        grows: bool,
        see_last: Callable[[Running], object],
        links: StageLinks | None = None,
        speculator: Speculator | None = None,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._device = device
        self._block_size = block_size
        self._grows = grows
        # Gives the last step's tokens to the sequences; called between forward and sampling where a row has a grammar,
        # whose mask follows from them.
        self._see_last = see_last
        self._links = links
        self._speculator = speculator
        self._encoder = encoder
        self._staging = Staging(device)
        self.profiler: StepProfiler | NoProfiler = NoProfiler()

    def start(self, batch: Batch) -> Running:
        """Start a batch that has taken no step."""
        return Running(batch, self._state())

    def drop_tensors(self, running: Running) -> None:
        """Free a lost batch's tensors, except the cache."""
        running.decode, running.newest, running.in_flight, running.windows = self._state(), None, None, None

    def may_follow(self, running: Running, call: StepCall) -> bool:
        """Whether, by its drafts, the next step can be submitted before the host has seen the last."""
        speculator = self._speculator
        if not isinstance(speculator, DeviceSpeculator):
            return True
        rows = _rows_of(running)
        if rows and running.batch.is_uniform and not isinstance(call, PrefillCall):
            if speculator.on_host(rows):
                return False
            if running.windows is not None and running.has_open_window:
                return speculator.on_device(running.windows, rows) and running.windows.state.can_go_on(rows)
        return not running.has_open_window

    def submit(
        self, running: Running, step: SubmittedStep, call: StepCall, cache: KvCache, session: Session
    ) -> list[Failure]:
        """Enqueue the next forward and sampling; return the rows that failed, and why."""
        failures = self._append_blocks(running, call, cache)
        if self._encoder is not None and running.batch.is_prefilling:
            failed = {sequence.id for sequence, _ in failures}
            with self.profiler.phase("images"):
                failures += encode_images(self._encoder, [s for s in running.batch.sequences if s.id not in failed])
            step.images = self._encoder.take_counts()
        for sequence, _ in failures:
            sequence.finished = True
        if failures:
            failed = {sequence.id for sequence, _ in failures}
            running.drop(lambda sequence: sequence.id in failed)
        rows = _rows_of(running)
        if not rows:
            return failures
        batch = running.batch
        if self._links is not None:
            num_sampling = len(rows) if batch.is_uniform else sum([s.samples for s in rows])
            step.passage = self._links.start(call.sequence, num_sampling)
        if batch.is_uniform and self._drafts_on_device(running, rows):
            self._submit_device_window(running, step, rows, cache)
            return failures
        window = self._window(step, rows) if batch.is_uniform else None
        if window is not None:
            self._submit_window(running, step, window, cache)
        elif batch.is_uniform:
            self._submit_decode(running, step, rows, cache)
        else:
            self._submit_ragged(running, step, rows, cache)
            batch.plan_chunks(session.max_prefill_tokens, call.chunk_tokens)
        return failures

    def _append_blocks(self, running: Running, call: StepCall, cache: KvCache) -> list[Failure]:
        """Give requests their blocks; return the rows that cannot take part, and why."""
        failures = []
        if call.new_blocks:
            failures = append_blocks(running.batch, running.decode.tables, call.new_blocks, cache)
        if self._grows and (failures or not running.repeats_rows):
            failures += rows_without_slots(running.batch)
        first: dict[int, Failure] = {}
        for failure in failures:
            first.setdefault(failure[0].id, failure)  # a request that is named twice fails once
        return list(first.values())

    def _window(self, step: SubmittedStep, rows: list[Sequence]) -> Window | None:
        """Return the drafts to check, if any pay."""
        if self._speculator is None or any(s.has_unseen for s in rows):
            return None
        step.drafted = NOTHING_DRAFTED
        with self.profiler.phase("drafting"), step.times.drafting():
            return self._speculator.window(rows)

    def _drafts_on_device(self, running: Running, rows: list[Sequence]) -> bool:
        speculator = self._speculator
        return isinstance(speculator, DeviceSpeculator) and speculator.on_device(running.windows, rows)

    def _submit_device_window(
        self, running: Running, step: SubmittedStep, rows: list[Sequence], cache: KvCache
    ) -> None:
        """Run each row's newest token and the device's draft; wait for nothing."""
        speculator = self._speculator
        assert isinstance(speculator, DeviceSpeculator)
        if running.windows is None:
            running.windows = speculator.start(self._staging)
        windows = running.windows
        state = windows.state
        with self.profiler.phase("inputs"):
            length = speculator.length(windows, rows)
            state.start(rows, running.decode.tables, running.newest, windows.unseen)
            inputs = state.inputs(length, running.decode.tables)
        running.decode.note_other_step()
        kept = speculator.retains()
        logits = self._forward(step, inputs, cache, kept)
        with self.profiler.phase("sampling"):
            chosen = self._sampler.sample_places(logits, [s.row for s in rows], state.places(length))
            tokens = WindowTokens(state.accept(length, chosen.ids, chosen.packed, kept), length, chosen.top)
        step.times.sampled = time.perf_counter_ns()
        step.rows, step.sampled, step.window, step.length = rows, tokens, tokens, length
        windows.submitted(rows, length)
        running.in_flight = step
        # Other ranks take the same decisions from what all of them have seen.
        running.gives_several = not speculator.alone and (length > 0 or speculator.is_due(windows))
        running.newest = NewestTokens(rows, tokens.ids)
        for sequence in rows:
            sequence.advance()

    def _submit_window(self, running: Running, step: SubmittedStep, window: Window, cache: KvCache) -> None:
        """Run each row's token and draft; wait for the tokens."""
        assert self._speculator is not None
        with self.profiler.phase("inputs"):
            running.note_other_step()
            inputs = window.inputs(running.decode.tables, self._staging)
        kept = self._speculator.retains()
        logits = self._forward(step, inputs, cache, kept)
        with self.profiler.phase("sampling"):
            checked = window.check(logits, self._sampler)
        step.times.sampled = time.perf_counter_ns()
        step.drafted = self._speculator.note(window, checked, self._computed(inputs, kept, checked.ids))
        step.rows, step.sampled = window.rows, checked
        running.in_flight, running.gives_several = step, True
        running.newest = NewestTokens(window.rows, checked.ids)
        for sequence in window.rows:
            sequence.advance()

    def _submit_decode(self, running: Running, step: SubmittedStep, rows: list[Sequence], cache: KvCache) -> None:
        with self.profiler.phase("inputs"):
            running.leave_windows()
            if running.windows is not None:
                running.windows.rested()
            inputs = running.decode.next(rows, running.newest)
        kept = None if self._speculator is None else self._speculator.retains_plain(rows)
        logits = self._forward(step, inputs, cache, kept)
        self._sample(running, step, rows, logits)
        if self._speculator is not None and self._speculator.watches:
            newest = None if step.sampled is None else step.sampled.ids
            self._speculator.on_step(decoded_rows(rows), self._computed(inputs, kept, newest))
        for sequence in rows:
            sequence.advance()

    def _submit_ragged(self, running: Running, step: SubmittedStep, rows: list[Sequence], cache: KvCache) -> None:
        """Run prompts, chunks and decode rows."""
        with self.profiler.phase("inputs"):
            running.note_other_step()
            inputs = ragged_inputs(rows, running.decode.tables, self._staging, running.newest)
        kept = None if self._speculator is None else self._speculator.retains()
        logits = self._forward(step, inputs.model, cache, kept)
        sampling = [s for s in rows if s.samples]
        if step.passage is None or step.passage.is_last:
            _keep_prompt_scores(inputs, logits)
            if inputs.sampled_rows is not None:
                logits = logits.index_select(0, inputs.sampled_rows)
        if sampling or step.passage is not None:
            self._sample(running, step, sampling, logits)
        elif logits.is_cuda:
            # No caller waits for ids of this step; without this one, whole prompts would queue up on the device.
            torch.cuda.current_stream(logits.device).synchronize()
        if self._speculator is not None and self._speculator.watches:
            newest = None if step.sampled is None else step.sampled.ids
            self._speculator.on_step(ragged_rows(rows, inputs), self._computed(inputs.model, kept, newest))
        for sequence in rows:
            sequence.advance()

    def _forward(self, step: SubmittedStep, inputs: ModelInputs, cache: KvCache, kept: Kept | None) -> Tensor:
        step.times.laid_out = time.perf_counter_ns()
        if kept is not None:
            inputs = dataclasses.replace(inputs, kept=kept)
        passage = step.passage
        if passage is not None:
            with self.profiler.phase("receive"):
                hidden = passage.receive(inputs.positions.shape[-1])
                inputs = dataclasses.replace(inputs, hidden=hidden)
        with self.profiler.phase("forward"):
            logits = self._runner.forward(inputs, cache)
        if passage is not None:
            passage.send(logits)
        step.times.enqueued = time.perf_counter_ns()
        return logits

    def _sample(self, running: Running, step: SubmittedStep, rows: list[Sequence], logits: Tensor) -> None:
        """Sample; a stage that is not the last ignores `logits`."""
        passage = step.passage
        if passage is not None and not passage.is_last:
            step.rows, step.sampled = rows, AwaitedTokens(passage, self._device)
        elif rows:
            if any(s.row.grammar is not None and s.has_unseen for s in rows):
                self._see_last(running)
            self._choose(step, rows, logits)
        if step.sampled is None:
            return
        if rows:
            step.times.sampled = time.perf_counter_ns()
        running.in_flight, running.gives_several = step, step.sampled.several
        running.newest = NewestTokens(rows, step.sampled.ids)

    def _choose(self, step: SubmittedStep, rows: list[Sequence], logits: Tensor) -> None:
        with self.profiler.phase("sampling"):
            step.rows, step.sampled = rows, self._sampler.sample(logits, [s.row for s in rows])

    def _computed(self, inputs: ModelInputs, kept: Kept | None, newest: Tensor | None) -> ComputedStep:
        return ComputedStep(inputs, kept, newest, self._staging)

    def _state(self) -> DecodeState:
        return DecodeState(self._device, self._block_size, self._staging)


def _rows_of(running: Running) -> list[Sequence]:
    """Return the rows with tokens left."""
    # A row that ended unknown to the router takes part while it has slots: other ranks may not have collected the step
    # in which it ended.
    rows = running.batch.sequences
    if running.repeats_rows:
        return rows
    going = [s for s in rows if not s.is_exhausted and (s.has_slots or not s.finished)]
    return rows if len(going) == len(rows) else going  # the list itself: by that the state knows its rows


def _keep_prompt_scores(inputs: StepInputs, logits: Tensor) -> None:
    """Keep the scores of prompt tokens: row j scores token j + 1."""
    # They come with the first token, and are on the host by then: a download of its own would wait for queued steps.
    for part in inputs.scored:
        following = part.sequence.ids[part.position + 1 : part.position + 1 + part.count]
        rows = logits[part.first_row : part.first_row + part.count]
        part.sequence.prompt_scores.append(prompt_scores(rows, following, part.sequence.top_n_tokens))
