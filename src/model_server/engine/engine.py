"""What the shard does for each call: prefill, decode, filter, clear. Runs on the device thread only.

A step is submitted and later collected. `submit_*` enqueues the forward and the sampling and moves every sequence's
counters on; the function that it returns waits for the tokens and does the host's share. On an asynchronous device the
next decode of the same batch is submitted in between, fed with ids that the host has not seen: what it computes for a
request that turns out to have ended is discarded.

Knows nothing of protobuf, sockets or how a model computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from model_server.batch.batch import Batch
from model_server.batch.extension import will_have_slots
from model_server.batch.results import CachedBatch, Generation, StepResult
from model_server.batch.sequence import NewRequest, Sequence
from model_server.distributed.layout import Layout
from model_server.engine.answers import Answers
from model_server.engine.calls import DecodeCall, PrefillCall, Session, StepCall
from model_server.engine.profile import StepProfiler
from model_server.engine.running import Running, StepTimes, SubmittedStep
from model_server.engine.sequences import CacheLayout, SequenceFactory
from model_server.engine.step import Stepper
from model_server.engine.store import BatchStore
from model_server.errors import BatchGoneError, FatalError, OutOfMemoryError, RequestError
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import Runner
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer

# Waits for a submitted step and gives its answer.
Collect = Callable[[], StepResult]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What does not change while the shard lives. chunking: a prompt may be computed in several steps."""

    device: torch.device
    layout: Layout = field(default_factory=Layout)
    block_size: int
    prompt_logprobs_allowed: bool
    chunking: bool = False


class Engine:
    """One rank's model, cache and running batches.

    `session`: what the router agreed at its warm-up. `keeps_state` is True where the runner holds a state for each
    request instead of paged KV memory.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, sampler: Sampler, options: EngineOptions) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.options = options
        self._sampler = sampler
        self._stepper = Stepper(runner, sampler, options.device, options.block_size)
        self.keeps_state = runner.traits.keeps_state
        prefix = runner.traits.decoder_prefix
        self._factory = SequenceFactory(
            tokenizer, sampler, runner.vocab_size, options.prompt_logprobs_allowed, options.layout.owns, prefix
        )
        self._store = BatchStore()
        self._cache: KvCache | None = None
        self._newest: tuple[Running, SubmittedStep] | None = None  # on the device
        self._collected_at = 0  # when the last step was collected, by `time.perf_counter_ns`
        self.begin(Session())

    @property
    def cache(self) -> KvCache:
        if self._cache is None:
            raise RequestError("the shard has not been warmed up")
        return self._cache

    def begin(self, session: Session) -> None:
        """A router begins: its extensions and limits hold from now on."""
        self.session = session
        self._answers = Answers(
            self.tokenizer, alone=self.options.layout.world.size == 1, row_errors=not session.upstream_router
        )

    def set_cache(self, cache: KvCache | None) -> None:
        """Give the engine its KV memory; every batch that used the old one is forgotten."""
        self._store.clear(None)
        self._cache = cache

    def profile(self, profiler: StepProfiler) -> None:
        """Profile steps from now on."""
        self._stepper.profiler = profiler

    def encode(self, requests: list[NewRequest]) -> list[list[int]]:
        """Token ids of the prompts. May run on any thread."""
        return self._factory.encode(requests)

    def may_overlap(self, call: PrefillCall | DecodeCall) -> bool:
        """Can this step be submitted while the last one is not collected?

        Only where submitting returns before the device is done; on a CPU it would just delay the answer. And only for a
        rank that is alone: whether the call comes before the last step is collected differs from rank to rank, and with
        it whether a request that ends in that step still takes part, and so the shapes of the collectives. And only
        where no running request has a grammar: a mask needs the last token on the host. And not if a row would fail for
        lack of a slot in the cache: it may end in the last step, and then it must not fail.
        """
        if not self._runs_ahead:
            return False
        if isinstance(call, PrefillCall):
            if call.cached_id is None:
                return True  # nothing of it is on the device
            batch_ids: tuple[int, ...] = (call.cached_id,)
        else:
            batch_ids = call.batch_ids
        if len(batch_ids) != 1:
            return False
        try:
            running = self._store.find(batch_ids[0])
        except BatchGoneError:
            return False  # submitting it answers with that error
        if running is None or running.in_flight is None or running.needs_last_step:
            return False
        return (
            not self.session.extends_blocks
            or (not call.extensions and running.repeats_rows)
            or will_have_slots(running.batch, call.extensions, self.cache)
        )

    def is_over(self) -> bool:
        """Whether the newest step has ended on the device, or none could be submitted after it before it ends."""
        if self._newest is None or not self._runs_ahead:
            return True
        running, step = self._newest
        return step.sampled is None or running.needs_last_step or step.sampled.is_over()

    @property
    def _runs_ahead(self) -> bool:
        return self.options.device.type != "cpu" and self.options.layout.world.size == 1

    def submit_prefill(self, call: PrefillCall, requests: list[NewRequest], prompts: list[list[int]]) -> Collect:
        """Start a new batch: all its prompts (or their first chunks) in one forward, and one token for each.

        Requests that join a running batch (`cached_id`) run in one forward with its own next step, under its id, which
        they take if that batch has ended (an error without a number). Whatever fails the call loses the running batch
        too.

        Raises RequestError, UnknownBatchError, BatchGoneError.
        """
        times = StepTimes()
        running = self._find(call.cached_id, call) if call.cached_id is not None else None
        with self._losing_on_error(running):
            sequences, refused = self._admit(requests, prompts)
            if running is not None:
                with _timed(times):
                    running.batch.join(Batch(call.batch_id, sequences))
                    if running.in_flight is not None:
                        running.in_flight.joined_since |= {sequence.id for sequence in sequences}
            elif sequences:
                batch_id = call.batch_id if call.cached_id is None else call.cached_id
                running = self._stepper.start(Batch(batch_id, sequences))
        if running is None:
            return lambda: _nothing(times, refused)
        step = self._submit(running, SubmittedStep(times, refused=refused), call)
        self._store.put(running)
        return partial(self._collect, running, step)

    def submit_decode(self, call: DecodeCall) -> Collect:
        """Merge the named batches into the first and run their next step: one token for each of their requests, or the
        next chunk of its prompt.

        Raises RequestError, UnknownBatchError, BatchGoneError.
        """
        times = StepTimes()
        if not call.batch_ids:
            raise RequestError("Must provide at least one batch")
        found = [self._find(i, call) for i in call.batch_ids]
        batches = [b for b in found if b is not None]
        if not batches:
            return lambda: _nothing(times)
        running = self._merge(batches, times)
        step = self._submit(running, SubmittedStep(times), call)
        return partial(self._collect, running, step)

    def lose(self, batch_id: int) -> None:
        """A call that was to run this batch failed before it could be submitted."""
        self._store.lose(batch_id)

    def filter(self, batch_id: int, request_ids: list[int], numbered: bool) -> CachedBatch | None:
        """Reduce a batch to the named requests; None (only for a numbered call) when nothing of it is left.

        Raises RequestError, UnknownBatchError, BatchGoneError.
        """
        if not request_ids:
            raise RequestError("Batch must have at least one request")
        running = self._store.find(batch_id) if numbered else self._store.get(batch_id)
        if running is None:
            return None
        running.filter(request_ids, strict=not numbered)
        if not running.batch.sequences and not running.batch.ended:
            self._store.remove(batch_id)
            return None
        return running.batch.describe(self.options.block_size)

    def clear(self, batch_id: int | None) -> None:
        """Forget one batch, or all. An unknown id is not an error."""
        self._store.clear(batch_id)
        if self.options.device.type == "cuda":
            torch.cuda.empty_cache()

    def try_sampling(self, sampling: SamplingParameters, num_rows: int) -> None:
        """Sample a token for each of `num_rows` rows from nothing, so that the memory it takes is seen."""
        sampling = dataclasses.replace(sampling, watermark=False, grammar=None)  # these go row by row
        rows = [self._sampler.new_row(sampling, [0], 1) for _ in range(num_rows)]
        logits = torch.zeros(num_rows, self.runner.vocab_size, device=self.options.device)
        self._sampler.sample(logits, rows)

    def health(self) -> None:
        """Touch the device; raises what it raises."""
        torch.zeros((2, 2), device=self.options.device)

    def _admit(self, requests: list[NewRequest], prompts: list[list[int]]) -> tuple[list[Sequence], list[Generation]]:
        """Sequences of the requests that can run, and this rank's answers to those that cannot.

        Raises RequestError for an empty batch, and for any bad request of a router that knows no row errors.
        """
        options = self.options
        layout = CacheLayout(block_size=options.block_size, num_blocks=self.cache.num_blocks, chunking=options.chunking)
        sequences, refusals = self._factory.sequences(requests, prompts, layout, self.session)
        answers = [(request_id, self._answers.error(request_id, reason)) for request_id, reason in refusals]
        return sequences, [answer for request_id, answer in answers if options.layout.owns(request_id)]

    def _find(self, batch_id: int, call: StepCall) -> Running | None:
        return self._store.find(batch_id) if call.numbered else self._store.get(batch_id)

    def _merge(self, batches: list[Running], times: StepTimes) -> Running:
        first, *others = batches
        if others:
            with _timed(times):
                for other in others:
                    first.batch.join(other.batch)
                    self._store.remove(other.batch.id)
        return first

    def _submit(self, running: Running, step: SubmittedStep, call: StepCall) -> SubmittedStep:
        """Enqueue the next forward of a batch and its sampling."""
        self._stepper.profiler.step()
        step.times.began = time.perf_counter_ns()
        if running.decode.has_run and running.in_flight is None:
            step.times.idle_ns = max(0, step.times.began - self._collected_at)
        with self._losing_on_error(running, step):
            failures = self._stepper.submit(running, step, call, self.cache, self.session)
            step.refused += self._answers.failures(failures)
        self._newest = running, step
        return step

    def _collect(self, running: Running, step: SubmittedStep) -> StepResult:
        """Wait for a step, and put its tokens into words."""
        if self._newest is not None and self._newest[1] is step:
            self._newest = None
        waited_from = time.perf_counter_ns()
        if running.lost_at is None or running.lost_at <= step.times.began:
            self._store.find(running.batch.id)  # raises if an earlier step failed; a later one answers itself
        with self._losing_on_error(running, step):
            with self._stepper.profiler.phase("wait"):
                host = step.sampled.to_host() if step.sampled is not None else None
            on_host = time.perf_counter_ns()
            if running.in_flight is step:
                running.in_flight = None
            with self._stepper.profiler.phase("text"):
                generations = self._answers.step(step.rows, host) if host is not None else []
            if host is not None and host.counts is not None:
                running.batch.note_several(step.rows, host.counts)
        running.drop_finished(keep_visible=self.session.upstream_router)
        batch = running.batch
        if not batch.sequences:
            self._store.remove(batch.id)
        seen = batch.without(step.joined_since)  # the router's next answer tells it of the others
        done = self._collected_at = time.perf_counter_ns()
        return StepResult(
            generations=step.refused + generations,
            batch=seen.describe(self.options.block_size) if seen.sequences else None,
            forward_ns=on_host - step.times.called,
            decode_ns=done - on_host,
            total_ns=done - step.times.called,
            concat_ns=step.times.concat_ns,
            phases_ns=step.times.phases(waited_from, on_host, done),
        )

    @contextlib.contextmanager
    def _losing_on_error(self, running: Running | None, step: SubmittedStep | None = None) -> Iterator[None]:
        """Whatever goes wrong in a step, its batch is gone: sequences and cache may disagree. One of several ranks that
        runs out of memory leaves the others inside a collective, so it must end."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            if running is not None:
                self._lose(running, step)
                self._stepper.drop_tensors(running)
            # The error's frames hold the step's tensors for as long as the error is being reported.
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()
            kind = OutOfMemoryError if self.options.layout.world.size == 1 else FatalError
            raise kind("out of memory in one step; lower --max-batch-prefill-tokens or --max-batch-size") from error
        except BaseException:
            if running is not None:
                self._lose(running, step)
            raise

    def _lose(self, running: Running, step: SubmittedStep | None) -> None:
        self._store.lose(running.batch.id)
        if running.lost_at is None:
            running.lost_at = time.perf_counter_ns() if step is None else step.times.began


@contextlib.contextmanager
def _timed(times: StepTimes) -> Iterator[None]:
    """Merging batches."""
    started = time.perf_counter_ns()
    yield
    times.concat_ns = time.perf_counter_ns() - started


def _nothing(times: StepTimes, refused: list[Generation] | None = None) -> StepResult:
    """The answer to a call without rows."""
    return StepResult(refused or [], None, 0, 0, time.perf_counter_ns() - times.called)
