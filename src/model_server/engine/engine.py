"""What the shard does for each call: prefill, decode, filter, clear. Runs on the device thread only.

A step has two halves. `launch_*` enqueues the forward and the draw and moves every sequence's counters on;
`LaunchedStep.finish` waits for the drawn ids and does the host's share. On an asynchronous device the next decode of
the same batch is launched in between, fed with ids that the host has not seen: what it computes for a request that
turns out to have ended is discarded.

Knows nothing of protobuf, sockets or how a model computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from model_server.batch.batch import Batch
from model_server.batch.growth import Failure, Growth, will_have_room
from model_server.batch.results import CachedBatch, Generation, StepResult
from model_server.batch.sequence import NewRequest, Sequence
from model_server.batch.store import BatchStore
from model_server.engine.admission import Admission, Place, with_places
from model_server.engine.answers import Answers
from model_server.engine.profile import StepProfiler
from model_server.engine.step import LaunchedStep, Stepper, goes_on
from model_server.errors import BatchGoneError, FatalError, OutOfMemoryError, RequestError
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import KeepsState, Runner
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import HostSampled, Sampler
from model_server.text.tokenizer import Tokenizer

_UNBOUNDED = 2**63 - 1  # until a warm-up says how many tokens one forward may have: no prompt is cut further


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What does not change while the shard lives. chunking: a prompt may be computed in several steps."""

    device: torch.device
    rank: int
    world_size: int
    block_size: int
    prompt_logprobs_allowed: bool
    chunking: bool = False


class Engine:
    """One rank's model, cache and running batches.

    `stock_router` is True until a router says at warm-up that it knows our extensions: then a request that ended stays
    listed in its batch until it is filtered, and an error in one row fails its whole step, as in TGI. `grows` is True
    where the router gives requests their blocks as they need them. `keeps_state` is True where the runner holds a state
    for each request instead of paged KV memory. `max_prefill_tokens` bounds the tokens of a step
    with chunks of prompts.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, sampler: Sampler, options: EngineOptions) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.options = options
        self.stock_router = True
        self.grows = False
        self.max_prefill_tokens = _UNBOUNDED
        self._sampler = sampler
        self._stepper = Stepper(runner, sampler, options.device)
        self.keeps_state = isinstance(runner, KeepsState)
        prefix = runner.decoder_prefix if isinstance(runner, KeepsState) else None
        self._admission = Admission(tokenizer, sampler, runner.vocab_size, options.prompt_logprobs_allowed, prefix)
        self._answers = Answers(tokenizer)
        self._store = BatchStore()
        self._cache: KvCache | None = None
        self._newest: LaunchedStep | None = None  # on the device
        self._finished_at = 0  # when the last step was finished, as `time.perf_counter_ns` says

    @property
    def cache(self) -> KvCache:
        if self._cache is None:
            raise RequestError("the shard has not been warmed up")
        return self._cache

    def set_cache(self, cache: KvCache | None) -> None:
        """Give the engine its KV memory; every batch that used the old one is forgotten."""
        self._store.clear(None)
        self._cache = cache

    def profile(self, profiler: StepProfiler) -> None:
        """Record steps from now on."""
        self._stepper.profiler = profiler

    def encode(self, requests: list[NewRequest]) -> list[list[int]]:
        """Token ids of the prompts. May run on any thread."""
        return self._admission.encode(requests)

    def may_overlap(self, batch_ids: list[int], growth: Rows[Growth] = ()) -> bool:
        """Can a decode of these batches be launched while the last step is not finished?

        Only where launching returns before the device is done; on a CPU it would just delay the answer. And only for a
        rank that is alone: whether the call comes before the last step is finished differs from rank to rank, and with
        it whether a request that ends in that step still takes part, hence the shapes of the collectives. And only
        without grammars: a mask needs the last token on the host. And not while prompts are computed in chunks, nor if
        a row would fail for want of a place in the cache: it may end in the last step, and then it must not fail.
        """
        if not self._runs_ahead or len(batch_ids) != 1:
            return False
        try:
            batch = self._store.find(batch_ids[0])
        except BatchGoneError:
            return False  # launching says so to whoever asked
        if batch is None or batch.launched is None:
            return False
        if _needs_its_last_step(batch):
            return False
        return not self.grows or (not growth and goes_on(batch)) or will_have_room(batch, growth, self.cache)

    def is_over(self) -> bool:
        """Whether the newest step has ended on the device, or none could be launched behind it before it ends."""
        step = self._newest
        if step is None or step.sampled is None or not self._runs_ahead or _needs_its_last_step(step.batch):
            return True
        return step.sampled.is_over()

    @property
    def _runs_ahead(self) -> bool:
        return self.options.device.type != "cpu" and self.options.world_size == 1

    def launch_prefill(
        self,
        batch_id: int,
        requests: list[NewRequest],
        prompts: list[list[int]],
        cached_id: int | None = None,
        growth: Rows[Growth] = (),
        numbered: bool = False,
        chunk_tokens: int | None = None,
    ) -> Callable[[], StepResult]:
        """Start a new batch: all its prompts (or their first chunks) in one forward, and one token for each.

        cached_id: a running batch that the requests join; it runs its own next step in the same forward and keeps its
        id, which the new batch takes if the running one has ended (that is an error without `numbered`). growth: blocks
        for the running requests. chunk_tokens: the most that the step after this one computes of prompts, None: what
        fits. Whatever fails the call loses the running batch too.

        Raises RequestError, UnknownBatchError, BatchGoneError.
        """
        started_ns = time.time_ns()
        cached = self._find(cached_id, numbered) if cached_id is not None else None
        if cached is None:
            sequences, refused = self._sequences(requests, prompts)
            if not sequences:
                return lambda: StepResult(refused, None, 0, 0, time.time_ns() - started_ns)
            batch = Batch(batch_id if cached_id is None else cached_id, sequences)
            step = self._launch(batch, growth, numbered, chunk_tokens)
        else:
            with self._losing_on_error(cached):
                sequences, refused = self._sequences(requests, prompts)
                concat_ns = time.time_ns()
                cached.extend(Batch(batch_id, sequences))
                concat_ns = time.time_ns() - concat_ns
                step = self._launch(cached, growth, numbered, chunk_tokens)
            step.concat_ns = concat_ns
        step.started_ns = started_ns
        step.refused = refused + step.refused
        self._store.put(step.batch)
        return lambda: self._finish(step)

    def launch_decode(
        self, batch_ids: list[int], numbered: bool, growth: Rows[Growth] = (), chunk_tokens: int | None = None
    ) -> Callable[[], StepResult]:
        """Merge the named batches into the first and run their next step: one token for each of their requests, or the
        next chunk of its prompt.

        numbered: a batch (or a request in `growth`) that is not here has ended normally and is skipped; without a
        number it is an error. chunk_tokens: see `launch_prefill`.

        Raises RequestError, UnknownBatchError, BatchGoneError.
        """
        started_ns = time.time_ns()
        if not batch_ids:
            raise RequestError("Must provide at least one batch")
        found = [self._find(i, numbered) for i in batch_ids]
        batches = [b for b in found if b is not None]
        if not batches:
            return lambda: StepResult([], None, 0, 0, time.time_ns() - started_ns)
        batch, concat_ns = self._merge(batches)
        step = self._launch(batch, growth, numbered, chunk_tokens)
        step.started_ns, step.concat_ns = started_ns, concat_ns
        return lambda: self._finish(step)

    def lose(self, batch_id: int) -> None:
        """A call that was to run this batch failed before it could be launched."""
        self._store.lose(batch_id)

    def filter(self, batch_id: int, request_ids: list[int], numbered: bool) -> CachedBatch | None:
        """Reduce a batch to the named requests; None (only for a numbered call) when nothing of it is left.

        Raises RequestError, UnknownBatchError, BatchGoneError.
        """
        if not request_ids:
            raise RequestError("Batch must have at least one request")
        batch = self._find(batch_id, numbered)
        if batch is None:
            return None
        batch.filter(request_ids, strict=not numbered)
        if not batch.sequences and not batch.ended:
            self._store.remove(batch_id)
            return None
        return batch.describe(self.options.block_size)

    def clear(self, batch_id: int | None) -> None:
        """Forget one batch, or all. An unknown id is not an error."""
        self._store.clear(batch_id)
        if self.options.device.type == "cuda":
            torch.cuda.empty_cache()

    def rehearse_draw(self, sampling: SamplingParameters, num_rows: int) -> None:
        """Draw a token for so many rows from nothing, so that the memory it takes is seen."""
        sampling = dataclasses.replace(sampling, watermark=False, grammar=None)  # these go row by row
        rows = [self._sampler.new_row(sampling, [0], 1) for _ in range(num_rows)]
        logits = torch.zeros(num_rows, self.runner.vocab_size, device=self.options.device)
        self._sampler.sample(logits, rows)

    def health(self) -> None:
        """Touch the device; raises what it raises."""
        torch.zeros((2, 2), device=self.options.device)

    def _sequences(
        self, requests: list[NewRequest], prompts: list[list[int]]
    ) -> tuple[list[Sequence], list[Generation]]:
        """Sequences of the requests that can run, and this rank's answers to those that cannot.

        Raises RequestError for an empty batch, and for any bad request of a stock router, which knows no row errors.
        """
        if not requests:
            raise RequestError("Batch must have at least one request")
        place = Place(
            block_size=self.options.block_size,
            num_blocks=self.cache.num_blocks,
            chunking=self.options.chunking,
            grows=self.grows,
        )
        sequences, refused = [], []
        placed = with_places(requests, prompts, self.options.block_size)
        for request, prompt in zip(placed, prompts, strict=True):
            owned = request.id % self.options.world_size == self.options.rank
            try:
                sequences.append(self._admission.sequence(request, prompt, place, owned=owned))
            except (RequestError, ValueError) as error:
                if self.stock_router:
                    raise
                if owned:
                    refused.append(Generation(request_id=request.id, error=str(error)))
        return sequences, refused

    def _find(self, batch_id: int, numbered: bool) -> Batch | None:
        return self._store.find(batch_id) if numbered else self._store.get(batch_id)

    def _merge(self, batches: list[Batch]) -> tuple[Batch, int | None]:
        if len(batches) == 1:
            return batches[0], None
        started_ns = time.time_ns()
        first = batches[0]
        for other in batches[1:]:
            first.extend(other)
            self._store.remove(other.id)
        return first, time.time_ns() - started_ns

    def _launch(self, batch: Batch, growth: Rows[Growth], numbered: bool, chunk_tokens: int | None) -> LaunchedStep:
        """Enqueue the next forward of a batch and its draws."""
        self._stepper.profiler.step()
        step = LaunchedStep(batch)
        # A batch that is decoding and not on the device has waited since the last step was finished.
        if batch.decode is not None and batch.launched is None:
            step.idle_ns = max(0, step.marks[0] - self._finished_at)
        with self._losing_on_error(batch, step):
            failures = self._stepper.grow(batch, growth, self.cache, numbered=numbered, grows=self.grows)
            self._fail_rows(step, failures)
            self._stepper.launch(
                step, self.cache, self.max_prefill_tokens, chunk_tokens=chunk_tokens, some_failed=bool(failures)
            )
        self._newest = step
        return step

    def _finish(self, step: LaunchedStep) -> StepResult:
        batch = step.batch
        if self._newest is step:
            self._newest = None
        waiting_at = time.perf_counter_ns()
        if batch.lost_at is None or batch.lost_at <= step.marks[0]:
            self._store.find(batch.id)  # raises if a step before this one failed; one behind it has its own answer
        with self._losing_on_error(batch, step), self._stepper.profiler.phase("wait"):
            host = step.sampled.to_host() if step.sampled is not None else None
        drawn_ns, drawn_at = time.time_ns(), time.perf_counter_ns()
        if batch.launched is step:
            batch.launched = None
        with self._stepper.profiler.phase("text"):
            generations = self._generations(step, host) if host is not None else []
        batch.drop_finished(keep_visible=self.stock_router)
        if not batch.sequences:
            self._store.remove(batch.id)
        done_ns, self._finished_at = time.time_ns(), time.perf_counter_ns()
        return StepResult(
            generations=step.refused + generations,
            batch=batch.describe(self.options.block_size) if batch.sequences else None,
            forward_ns=drawn_ns - step.started_ns,
            decode_ns=done_ns - drawn_ns,
            total_ns=done_ns - step.started_ns,
            concat_ns=step.concat_ns,
            phases_ns=_phases(step, waiting_at, drawn_at, self._finished_at),
        )

    def _generations(self, step: LaunchedStep, host: HostSampled) -> list[Generation]:
        generations = []
        for index, sequence in enumerate(step.rows):
            if sequence.finished:
                continue  # it ended while this step was already on the device
            owned = sequence.owned
            generation = self._generation(step, host, index, sequence)
            if owned:
                generations.append(generation)
        return generations

    def _generation(self, step: LaunchedStep, host: HostSampled, index: int, sequence: Sequence) -> Generation:
        if host.failed[index]:
            sequence.finished = True
            return self._error(step, sequence, sequence.row.why_failed)
        try:
            return self._answers.generation(sequence, host, index)
        except Exception as error:
            if self.options.world_size == 1:
                sequence.finished = True
            else:
                sequence.disown()
            return self._error(step, sequence, f"{type(error).__name__}: {error}")

    def _fail_rows(self, step: LaunchedStep, failures: list[Failure]) -> None:
        """End requests before the forward."""
        for sequence, reason in failures:
            if sequence.finished:
                continue
            sequence.finished = True
            generation = self._error(step, sequence, reason)
            if sequence.owned:
                step.refused.append(generation)

    def _error(self, step: LaunchedStep, sequence: Sequence, reason: str) -> Generation:
        """The answer for a row that failed. A stock router knows no such thing: its whole batch is lost."""
        if self.stock_router:
            self._store.lose(step.batch.id)
            raise RequestError(reason)
        return Generation(request_id=sequence.id, error=reason)

    @contextlib.contextmanager
    def _losing_on_error(self, batch: Batch, step: LaunchedStep | None = None) -> Iterator[None]:
        """Whatever goes wrong in a step, its batch is gone: sequences and cache may disagree. One of several ranks that
        runs out of memory leaves the others inside a collective, so it must end."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._lose(batch, step)
            batch.decode = batch.drawn = batch.launched = None
            # The error's frames hold the step's tensors for as long as somebody reports it.
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()
            kind = OutOfMemoryError if self.options.world_size == 1 else FatalError
            raise kind("out of memory in one step; lower --max-batch-prefill-tokens or --max-batch-size") from error
        except BaseException:
            self._lose(batch, step)
            raise

    def _lose(self, batch: Batch, step: LaunchedStep | None) -> None:
        self._store.lose(batch.id)
        if batch.lost_at is None and step is not None:
            batch.lost_at = step.marks[0]


def _needs_its_last_step(batch: Batch) -> bool:
    """No step of the batch can be launched before the one before it has been finished."""
    return batch.is_prefilling or any(s.row.grammar is not None for s in batch.sequences)


def _phases(step: LaunchedStep, waiting_at: int, drawn_at: int, done_at: int) -> tuple[int, ...]:
    """Durations in the order of `wire.step_phases.PHASES`; empty for a step that drew nothing."""
    if len(step.marks) < 4:
        return ()
    began, laid_out, enqueued, drawn = step.marks
    return (
        step.idle_ns, laid_out - began, enqueued - laid_out, drawn - enqueued, drawn_at - waiting_at, done_at - drawn_at
    )  # fmt: skip
