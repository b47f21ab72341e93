"""What the shard does for each call: prefill, decode, filter, clear. Runs on the device thread only.

A step has two halves. `launch_*` enqueues the forward and the draw and moves every sequence's counters on;
`LaunchedStep.finish` waits for the drawn ids and does the host's share. On an asynchronous device the next decode of
the same batch is launched in between, fed with ids that the host has not seen: what it computes for a request that
turns out to have ended is discarded.

Knows nothing of protobuf, sockets or how a model computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.admission import Admission, Place, with_places
from model_server.answers import Answers
from model_server.batch.batch import Batch
from model_server.batch.growth import Failure, Growth, grow, rows_without_room, will_have_room
from model_server.batch.inputs import StepInputs, decode_inputs, ragged_inputs
from model_server.batch.sequence import NewRequest, Sequence
from model_server.batch.store import BatchStore
from model_server.errors import FatalError, OutOfMemoryError, RequestError
from model_server.generation import CachedBatch, Generation, StepResult
from model_server.kv_cache import KvCache
from model_server.runner import KeepsState, Runner
from model_server.sampling.logprobs import prompt_logprobs
from model_server.sampling.sampler import HostSampled, Sampled, Sampler
from model_server.tokenizer import Tokenizer

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


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device. `rows` are the sequences that draw a token in it, in the order of `sampled`; `refused`
    answers for requests that took no part in it."""

    batch: Batch
    started_ns: int
    rows: list[Sequence] = field(default_factory=list)
    sampled: Sampled | None = None
    concat_ns: int | None = None
    refused: list[Generation] = field(default_factory=list)


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
        self.keeps_state = isinstance(runner, KeepsState)
        prefix = runner.decoder_prefix if isinstance(runner, KeepsState) else None
        self._admission = Admission(tokenizer, sampler, runner.vocab_size, options.prompt_logprobs_allowed, prefix)
        self._answers = Answers(tokenizer)
        self._store = BatchStore()
        self._cache: KvCache | None = None

    @property
    def cache(self) -> KvCache:
        if self._cache is None:
            raise RequestError("the shard has not been warmed up")
        return self._cache

    def set_cache(self, cache: KvCache | None) -> None:
        """Give the engine its KV memory; every batch that used the old one is forgotten."""
        self._store.clear(None)
        self._cache = cache

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
        if self.options.device.type == "cpu" or self.options.world_size > 1 or len(batch_ids) != 1:
            return False
        batch = self._store.find(batch_ids[0])
        if batch is None or batch.launched is None:
            return False
        if batch.is_prefilling or any(s.row.grammar is not None for s in batch.sequences):
            return False
        return not self.grows or will_have_room(batch, growth, self.cache)

    def launch_prefill(
        self,
        batch_id: int,
        requests: list[NewRequest],
        prompts: list[list[int]],
        cached_id: int | None = None,
        growth: Rows[Growth] = (),
        numbered: bool = False,
    ) -> Callable[[], StepResult]:
        """Start a new batch: all its prompts (or their first chunks) in one forward, and one token for each.

        cached_id: a running batch that the requests join; it runs its own next step in the same forward and keeps its
        id, which the new batch takes if the running one has ended (that is an error without `numbered`). growth: blocks
        for the running requests. Whatever fails the call loses the running batch too.

        Raises RequestError, UnknownBatchError, BatchGoneError.
        """
        started_ns = time.time_ns()
        cached = self._find(cached_id, numbered) if cached_id is not None else None
        if cached is None:
            sequences, refused = self._sequences(requests, prompts)
            if not sequences:
                return lambda: StepResult(refused, None, 0, 0, time.time_ns() - started_ns)
            step = self._launch(Batch(batch_id if cached_id is None else cached_id, sequences), growth, numbered)
        else:
            with self._losing_on_error(cached):
                sequences, refused = self._sequences(requests, prompts)
                concat_ns = time.time_ns()
                cached.extend(Batch(batch_id, sequences))
                concat_ns = time.time_ns() - concat_ns
                step = self._launch(cached, growth, numbered)
            step.concat_ns = concat_ns
        step.started_ns = started_ns
        step.refused = refused + step.refused
        self._store.put(step.batch)
        return lambda: self._finish(step)

    def launch_decode(
        self, batch_ids: list[int], numbered: bool, growth: Rows[Growth] = ()
    ) -> Callable[[], StepResult]:
        """Merge the named batches into the first and run their next step: one token for each of their requests, or the
        next chunk of its prompt.

        numbered: a batch (or a request in `growth`) that is not here has ended normally and is skipped; without a
        number it is an error.

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
        step = self._launch(batch, growth, numbered)
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

    def _launch(self, batch: Batch, growth: Rows[Growth], numbered: bool) -> LaunchedStep:
        """Enqueue the next forward of a batch and its draws."""
        step = LaunchedStep(batch, time.time_ns())
        with self._losing_on_error(batch):
            if growth:
                self._fail_rows(step, grow(batch, growth, self.cache, numbered=numbered))
            if self.grows:
                self._fail_rows(step, rows_without_room(batch))
            rows = [s for s in batch.sequences if not (s.is_exhausted or s.finished)]
            if not rows:
                return step
            tables = batch.block_tables()
            if len(rows) < len(batch.sequences):
                taking = {id(s) for s in rows}
                tables = tables[[i for i, s in enumerate(batch.sequences) if id(s) in taking]]
            if batch.is_prefilling:
                self._run_ragged(step, rows, tables)
            else:
                inputs = decode_inputs(rows, tables, _unseen_ids(batch, rows), self.options.device)
                self._draw(step, rows, self.runner.forward(inputs.model, self.cache))
                for sequence in rows:
                    sequence.advance()
        return step

    def _run_ragged(self, step: LaunchedStep, rows: list[Sequence], tables: npt.NDArray[np.int32]) -> None:
        """One forward of prompts, chunks and decode rows; then the next chunks are planned."""
        assert not any(s.is_behind for s in rows), "launched ahead of a step whose ids it needs"
        inputs = ragged_inputs(rows, tables, self.options.device)
        logits = self.runner.forward(inputs.model, self.cache)
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
        step.batch.plan_chunks(self.max_prefill_tokens)

    def _draw(self, step: LaunchedStep, rows: list[Sequence], logits: Tensor) -> None:
        step.rows, step.sampled = rows, self._sampler.sample(logits, [s.row for s in rows])
        step.batch.launched = step

    def _finish(self, step: LaunchedStep) -> StepResult:
        batch = step.batch
        self._store.find(batch.id)  # raises if the step before this one failed
        with self._losing_on_error(batch):
            host = step.sampled.to_host() if step.sampled is not None else None
        drawn_ns = time.time_ns()
        if batch.launched is step:
            batch.launched = None
        generations = self._generations(step, host) if host is not None else []
        batch.drop_finished(keep_visible=self.stock_router)
        if not batch.sequences:
            self._store.remove(batch.id)
        done_ns = time.time_ns()
        return StepResult(
            generations=step.refused + generations,
            batch=batch.describe(self.options.block_size) if batch.sequences else None,
            forward_ns=drawn_ns - step.started_ns,
            decode_ns=done_ns - drawn_ns,
            total_ns=done_ns - step.started_ns,
            concat_ns=step.concat_ns,
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
    def _losing_on_error(self, batch: Batch) -> Iterator[None]:
        """Whatever goes wrong in a step, its batch is gone: sequences and cache may disagree. One of several ranks that
        runs out of memory leaves the others inside a collective, so it must end."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._store.lose(batch.id)
            torch.cuda.empty_cache()
            kind = OutOfMemoryError if self.options.world_size == 1 else FatalError
            raise kind("out of memory in one step; lower --max-batch-prefill-tokens or --max-batch-size") from error
        except BaseException:
            self._store.lose(batch.id)
            raise


def _unseen_ids(batch: Batch, rows: list[Sequence]) -> Tensor | None:
    """The ids of the step before, on the device, for rows whose last token the host has not seen yet."""
    if not any(s.is_behind for s in rows):
        return None
    step = batch.launched
    assert step is not None and step.sampled is not None, "a row is behind, but no step is launched"
    place = {id(s): i for i, s in enumerate(step.rows)}
    picked = [place[id(s)] for s in rows]
    if len(picked) == len(step.rows):
        return step.sampled.ids
    return step.sampled.ids.index_select(0, torch.tensor(picked, device=step.sampled.ids.device))


def _keep_prompt_logprobs(inputs: StepInputs, logits: Tensor) -> None:
    """Row j of a prompt's logits scores its token j + 1; the logprobs are delivered with the request's first token."""
    for part in inputs.scored:
        following = part.sequence.ids[part.position + 1 : part.position + 1 + part.count]
        ids = torch.tensor(following, dtype=torch.int64, device=logits.device)
        scores = logits[part.first_row : part.first_row + part.count]
        part.sequence.prompt_logprobs.append(prompt_logprobs(scores, ids))
