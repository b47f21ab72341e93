"""What the shard does for each call: prefill, decode, filter, clear; on the device thread only."""

# A step (`steps/`) is submitted and later collected. `submit_*` chooses it, enqueues its forward and sampling and moves
# every sequence's counters on; the function that it returns waits for the tokens and does the host's share. On an
# asynchronous device the next decode of the same batch is submitted in between, fed with ids that the host has not
# seen: what it computes for a request that turns out to have ended is discarded.
#
# Knows nothing of protobuf, sockets or how a model computes.

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from model_server.batch.batch import Batch
from model_server.batch.feature import ModelFeature
from model_server.batch.growth import will_have_slots
from model_server.batch.results import CachedBatch, Generation, StepResult
from model_server.batch.sequence import NewRequest, Sequence
from model_server.distributed.group import ProcessGroup
from model_server.distributed.layout import Layout
from model_server.distributed.stage_links import StageLinks
from model_server.engine.answers import Answers
from model_server.engine.calls import DecodeCall, PrefillCall, Session, StepCall
from model_server.engine.profile import StepProfiler
from model_server.engine.sequences import CacheLayout, SequenceFactory
from model_server.engine.steps.choice import may_follow, next_step, prepare_rows
from model_server.engine.steps.context import StepContext, StepTimes
from model_server.engine.steps.maker import StepMaker
from model_server.engine.steps.running import Running, SubmittedCall
from model_server.engine.steps.step import Step
from model_server.engine.store import BatchStore
from model_server.errors import BatchGoneError, FatalError, GrammarError, OutOfMemoryError, RequestError
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import Staging
from model_server.runner.runner import Runner
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer

# Waits for a submitted step and gives its answer.
Collect = Callable[[], StepResult]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What does not change while the shard lives."""

    device: torch.device
    layout: Layout = field(default_factory=Layout)
    block_size: int
    prompt_logprobs_allowed: bool
    # A prompt may take several steps.
    chunking: bool = False
    # Running requests may get more blocks.
    grows: bool = False
    # The ranks that sample the same rows, this one included.
    peers: ProcessGroup = field(default_factory=ProcessGroup)


class Engine:
    """One rank's model, cache and running batches.

    `session` is the last warm-up's; `keeps_state`: the runner holds a state for each request instead of paged KV
    memory.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        sampler: Sampler,
        options: EngineOptions,
        links: StageLinks | None = None,
        maker: StepMaker | None = None,
        features: tuple[ModelFeature, ...] = (),
    ) -> None:
        """links, features: as in `StepContext`; maker: of the feature that makes steps, if any."""
        self.runner = runner
        self.tokenizer = tokenizer
        self.options = options
        self._sampler = sampler
        self.keeps_state = runner.traits.keeps_state
        self.session = Session()
        self.maker = maker
        self.steps = StepContext(
            runner=runner,
            sampler=sampler,
            answers=self._new_answers(),
            device=options.device,
            staging=Staging(options.device),
            block_size=options.block_size,
            grows=options.grows,
            links=links,
            watcher=None if maker is None else maker.watcher,
            features=features,
        )
        self._factory = SequenceFactory(
            tokenizer, sampler, runner.vocab_size, options.prompt_logprobs_allowed, options.layout.owns,
            runner.traits.decoder_prefix, features, options.peers,
        )  # fmt: skip
        self._store = BatchStore()
        self._submitted: deque[SubmittedCall] = deque()  # and not collected, the oldest first
        self._collected_at = 0  # when the last step was collected, by `time.perf_counter_ns`

    @property
    def cache(self) -> KvCache:
        return self.steps.cache

    def start(self, session: Session) -> None:
        """Begin a router's session."""
        self.session = session
        self.steps.answers = self._new_answers()

    def set_cache(self, cache: KvCache | None) -> None:
        """Set the KV memory, and forget batches of the old one."""
        self._store.clear(None)
        self.steps.warmed_cache = cache

    def profile(self, profiler: StepProfiler) -> None:
        """Profile steps from now on."""
        self.steps.profiler = profiler

    def compile_grammars(self, requests: list[NewRequest]) -> None:
        """Compile as `SequenceFactory.compile_grammars`."""
        self._factory.compile_grammars(requests)

    def may_overlap(self, call: PrefillCall | DecodeCall) -> bool:
        """Whether this step can be submitted before the last one is collected."""
        # Only where submitting returns before the device is done: on a CPU it would delay the answer. A stage that
        # waits for the last one's tokens runs other batches meanwhile; the last stage does not, since the others wait
        # for its tokens.
        batch_ids = call.continued
        if self.steps.links is not None:
            return self._awaits_tokens and not any(self._is_in_flight(batch_id) for batch_id in batch_ids)
        if not self._runs_ahead:
            return False
        if not batch_ids:
            return True  # nothing of it is on the device
        if len(batch_ids) > 1:
            return False
        try:
            running = self._store.find(batch_ids[0])
        except BatchGoneError:
            return False  # submitting it answers with that error
        return running is not None and running.in_flight is not None and self._runs_before_answer(call, running)

    def _runs_before_answer(self, call: StepCall, running: Running) -> bool:
        """Whether the step's rows follow from the calls alone, equally on every rank."""
        # All ranks then build the same rows, collected or not, and collectives have the same shapes. Not if a row would
        # lack a slot: it may end in the last step, and then must not fail.
        running.drop(lambda s: s.ended_in is not None and call.follows_answer_of(s.ended_in))
        if not call.unanswered or running.needs_last_step or not may_follow(running, call):
            return False
        return (
            not self.options.grows
            or (not call.new_blocks and running.repeats_rows)
            or will_have_slots(running.batch, call.new_blocks, self.cache)
        )

    def is_over(self) -> bool:
        """Whether the oldest uncollected step has ended, or no other could be submitted before."""
        if not self._submitted or not (self._runs_ahead or self._awaits_tokens):
            return True
        return self._submitted[0].is_over(follows_tokens=not self._awaits_tokens)

    @property
    def _runs_ahead(self) -> bool:
        return self.options.device.type != "cpu"

    @property
    def _awaits_tokens(self) -> bool:
        """Whether tokens come from another stage."""
        return self.steps.links is not None and not self.steps.links.is_last

    def _is_in_flight(self, batch_id: int) -> bool:
        return any(one.running.batch.id == batch_id for one in self._submitted)

    def submit_prefill(self, call: PrefillCall, requests: list[NewRequest]) -> Collect:
        """Start a batch: one forward of all prompts (or first chunks), and a token for each.

        Requests that join a running batch (`cached_id`) run with its next step, under its id. A failed call loses that
        batch too.

        Raises:
            RequestError, BatchGoneError: The call cannot run.
        """
        times = StepTimes()
        running = self._store.find(call.cached_id) if call.cached_id is not None else None
        if running is not None:
            running = self._without_ended(running, call, is_alone=True)
        with self._losing_on_error(running, times):
            sequences, refused = self._admit(requests, call)
            if running is not None:
                with times.merging():
                    self._join(running, Batch(call.batch_id, sequences))
            elif sequences:
                batch_id = call.batch_id if call.cached_id is None else call.cached_id
                running = Running(Batch(batch_id, sequences), self.steps, self.maker)
        if running is None:
            return lambda: _nothing(times, refused)
        submitted = self._submit(running, call, times, refused)
        self._store.put(running)
        return partial(self._collect, submitted)

    def submit_decode(self, call: DecodeCall) -> Collect:
        """Merge the batches into the first and run its next step.

        Raises:
            RequestError, BatchGoneError: The call cannot run.
        """
        times = StepTimes()
        if not call.batch_ids:
            raise RequestError("Must provide at least one batch")
        found = [self._store.find(i) for i in call.batch_ids]
        left = [self._without_ended(b, call, is_alone=len(found) == 1) for b in found if b is not None]
        batches = [b for b in left if b is not None]
        if not batches:
            return lambda: _nothing(times)
        running = self._merge(batches, times)
        return partial(self._collect, self._submit(running, call, times, []))

    def lose(self, batch_id: int) -> None:
        """Lose the batch of a call that failed before it was submitted."""
        self._store.lose(batch_id)

    def filter(self, batch_id: int, request_ids: list[int]) -> CachedBatch | None:
        """Reduce a batch to the named requests, if any are left."""
        if not request_ids:
            raise RequestError("Batch must have at least one request")
        running = self._store.find(batch_id)
        if running is None:
            return None
        running.drop(lambda s: s.ended_in is not None)
        running.filter(request_ids)
        if not running.batch.sequences:
            self._store.remove(running)
            return None
        return running.batch.describe(self.options.block_size)

    def clear(self, batch_id: int | None) -> None:
        """Forget a batch, known or not, or all."""
        # With all of them torch's kept memory goes: giving it back waits for the device, and costs the next prompt 10
        # ms, too much after each batch.
        self._store.clear(batch_id)
        if batch_id is None and self.options.device.type == "cuda":
            torch.cuda.empty_cache()

    def try_sampling(self, sampling: SamplingParameters, num_rows: int) -> None:
        """Sample `num_rows` rows of nothing, to see the memory it takes."""
        sampling = dataclasses.replace(sampling, watermark=False, grammar=None)  # these go row by row
        rows = [self._sampler.new_row(sampling, [0], 1) for _ in range(num_rows)]
        logits = torch.zeros(num_rows, self.runner.vocab_size, device=self.options.device)
        self._sampler.sample(logits, rows)

    def health(self) -> None:
        """Touch the device; raises what it raises."""
        torch.zeros((2, 2), device=self.options.device)

    def _admit(self, requests: list[NewRequest], call: PrefillCall) -> tuple[list[Sequence], list[Generation]]:
        """Return sequences of requests that can run, and this rank's answers to the others."""
        options, states = self.options, self.runner.traits.recurrent
        layout = CacheLayout(
            block_size=options.block_size, num_blocks=self.cache.num_blocks, chunking=options.chunking,
            grows=options.grows, num_states=0 if states is None else states.num_slots,
            prefix_length=self.runner.traits.prefix_length,
        )  # fmt: skip
        sequences, refusals = self._factory.sequences(requests, layout, partial(self._store.sequences, call))
        answers = [
            Generation(request_id, error=str(error), grammar_at_fault=isinstance(error, GrammarError))
            for request_id, error in refusals
        ]
        return sequences, [one for one in answers if options.layout.owns(one.request_id)]

    def _without_ended(self, running: Running, call: StepCall, *, is_alone: bool) -> Running | None:
        """Drop what has ended from the next step; None if nothing is left.

        Args:
            is_alone: The call names no other batch.
        """
        if not self._runs_ahead:
            return running
        self._store.forget_ended(call)
        if not (is_alone and self._runs_before_answer(call, running)):
            running.drop(lambda s: s.ended_in is not None)  # every rank has collected all steps before this one
        if not running.batch.sequences:
            self._store.remove(running)
            return None
        return running

    def _merge(self, batches: list[Running], times: StepTimes) -> Running:
        first, *others = batches
        if others:
            with times.merging():
                for other in others:
                    first.join(other)
                    self._store.remove(other)
        return first

    def _join(self, running: Running, batch: Batch) -> None:
        """Add new requests to a batch, of whose submitted step they are no part."""
        for submitted in self._submitted:
            if submitted.step is not None and submitted.step is running.in_flight:
                submitted.joined_since |= {sequence.id for sequence in batch.sequences}
        running.batch.join(batch)

    def _submit(self, running: Running, call: StepCall, times: StepTimes, refused: list[Generation]) -> SubmittedCall:
        """Choose a batch's next step, and enqueue its forward and sampling."""
        steps = self.steps
        steps.profiler.step()
        times.began = time.perf_counter_ns()
        if running.has_run and running.in_flight is None:
            times.idle_ns = max(0, times.began - self._collected_at)
        with self._losing_on_error(running, times):
            failures, reports = prepare_rows(steps, running, call)
            refused += steps.answers.failures(failures)
            step = next_step(steps, running, call, self.session, times)
        if step is not None:
            with self._losing_on_error(running, times, step):
                step.submit(running.in_flight)
            running.on_submitted(step)
        number = call.sequence if self._runs_ahead else None
        submitted = SubmittedCall(
            running=running, step=step, times=times, refused=refused, reports=reports, number=number
        )
        self._submitted.append(submitted)
        return submitted

    def _collect(self, submitted: SubmittedCall) -> StepResult:
        """Wait for a step and make its answers."""
        running, times = submitted.running, submitted.times
        self._submitted.remove(submitted)
        if running.lost_at is None or running.lost_at <= times.began:
            self._store.find(running.batch.id)  # raises if an earlier step failed; a later one answers itself
        with self._losing_on_error(running, times, submitted.step):
            found = submitted.collect()
        submitted.release()
        if not running.batch.sequences:
            self._store.remove(running)
        self._collected_at = time.perf_counter_ns()
        return submitted.result(found, self.options.block_size)

    @contextlib.contextmanager
    def _losing_on_error(self, running: Running | None, times: StepTimes, step: Step | None = None) -> Iterator[None]:
        """Lose the batch of a step that fails: sequences and cache may disagree; other stages lose it too.

        One rank of several without memory must end: it leaves the others in a collective.
        """
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            if running is not None:
                self._lose(running, times)
                running.drop_tensors()
            # The error's frames hold the step's tensors for as long as the error is being reported.
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()
            kind = OutOfMemoryError if self.options.layout.tensor.size == 1 else FatalError
            failure = kind("out of memory in one step; lower --max-batch-prefill-tokens or --max-batch-size")
            if step is not None:
                step.fail(failure)
            raise failure from error
        except BaseException as error:
            if running is not None:
                self._lose(running, times)
            if step is not None:
                step.fail(error)
            raise

    def _lose(self, running: Running, times: StepTimes) -> None:
        self._store.lose(running.batch.id)
        if running.lost_at is None:
            running.lost_at = times.began or time.perf_counter_ns()

    def _new_answers(self) -> Answers:
        return Answers(self.tokenizer, alone=self.options.layout.world.size == 1)


def _nothing(times: StepTimes, refused: list[Generation] | None = None) -> StepResult:
    """The answer to a call without rows."""
    return StepResult(refused or [], None, 0, 0, time.perf_counter_ns() - times.called)
