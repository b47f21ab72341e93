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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_server.batch.batch import Batch
from model_server.batch.inputs import StepInputs, decode_inputs, prefill_inputs
from model_server.batch.sequence import NewRequest, Sequence, check_layout, number_blocks
from model_server.batch.store import BatchStore
from model_server.detokenizer import Detokenizer
from model_server.errors import OutOfMemoryError, RequestError
from model_server.generation import CachedBatch, Generation, StepResult, Tokens
from model_server.kv_cache import KvCache
from model_server.runner import Runner
from model_server.sampling.grammar import Grammars
from model_server.sampling.logprobs import prompt_logprobs
from model_server.sampling.sampler import HostSampled, Sampled, Sampler
from model_server.sampling.stopping import StoppingState
from model_server.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What does not change while the shard lives."""

    device: torch.device
    rank: int
    world_size: int
    block_size: int
    prompt_logprobs_allowed: bool


@dataclass(slots=True)
class LaunchedStep:
    """A step on the device. `rows` are the sequences that draw a token in it, in the order of `sampled`."""

    batch: Batch
    rows: list[Sequence]
    sampled: Sampled | None
    started_ns: int
    concat_ns: int | None = None
    prefill: PrefillLogprobs | None = None
    refused: list[Generation] = field(default_factory=list)


@dataclass(slots=True)
class PrefillLogprobs:
    """Prompt logprobs on the device: for sequence id, [input_length - 1] float32."""

    values: dict[int, Tensor] = field(default_factory=dict)


class Engine:
    """One rank's model, cache and running batches.

    `stock_router` is True until a router says at warm-up that it knows our extensions: then a request that ended stays
    listed in its batch until it is filtered, and an error in one row fails its whole step, as in TGI.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, sampler: Sampler, options: EngineOptions) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.options = options
        self.stock_router = True
        self._sampler = sampler
        self._grammars = Grammars(tokenizer, runner.vocab_size)
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
        """Token ids of the prompts. May run on any thread; compiles grammars too, so that no step waits for them."""
        for request in requests:
            if request.sampling.grammar is not None:
                with contextlib.suppress(RequestError):  # reported for this request alone, when its turn comes
                    self._grammars.compiled(request.sampling.grammar)
        return [
            self.tokenizer.encode(r.text, truncate=r.truncate, add_special_tokens=r.add_special_tokens)
            for r in requests
        ]

    def may_overlap(self, batch_ids: list[int]) -> bool:
        """Can a decode of these batches be launched while the last step is not finished?

        Only where launching returns before the device is done; on a CPU it would just delay the answer. And only for a
        rank that is alone: whether the call comes before the last step is finished differs from rank to rank, and with
        it whether a request that ends in that step still takes part, hence the shapes of the collectives. And only
        without grammars: a mask needs the last token on the host.
        """
        if self.options.device.type == "cpu" or self.options.world_size > 1 or len(batch_ids) != 1:
            return False
        batch = self._store.find(batch_ids[0])
        if batch is None or batch.launched is None:
            return False
        return all(s.row.grammar is None for s in batch.sequences)

    def launch_prefill(
        self, batch_id: int, requests: list[NewRequest], prompts: list[list[int]]
    ) -> Callable[[], StepResult]:
        """Start a new batch: all its prompts in one forward, and one token for each."""
        started_ns = time.time_ns()
        sequences, refused = self._sequences(requests, prompts)
        if not sequences:
            return lambda: StepResult(refused, None, 0, 0, time.time_ns() - started_ns)
        batch = Batch(batch_id, sequences)
        with self._losing_on_error(batch):
            inputs = prefill_inputs(batch.sequences, batch.block_tables(), self.options.device)
            logits = self.runner.forward(inputs.model, self.cache)
            prefill = _collect_prompt_logprobs(batch.sequences, inputs, logits)
            if inputs.last_rows is not None:
                logits = logits.index_select(0, inputs.last_rows)
            step = self._draw(batch, list(batch.sequences), logits, started_ns)
            step.prefill, step.refused = prefill, refused
        self._store.put(batch)
        return lambda: self._finish(step)

    def launch_decode(self, batch_ids: list[int], numbered: bool) -> Callable[[], StepResult]:
        """Merge the named batches into the first and draw one token for each of their requests.

        numbered: a batch that is not here has ended normally and is skipped; without a number it is an error.

        Raises UnknownBatchError, BatchGoneError.
        """
        started_ns = time.time_ns()
        if not batch_ids:
            raise RequestError("Must provide at least one batch")
        found = [self._store.find(i) if numbered else self._store.get(i) for i in batch_ids]
        batches = [b for b in found if b is not None]
        if not batches:
            return lambda: StepResult([], None, 0, 0, time.time_ns() - started_ns)
        batch, concat_ns = self._merge(batches)
        with self._losing_on_error(batch):
            rows = [s for s in batch.sequences if not s.is_exhausted]
            if not rows:
                step = LaunchedStep(batch, [], None, started_ns)
            else:
                tables = batch.block_tables()
                if len(rows) < len(batch.sequences):
                    tables = tables[[i for i, s in enumerate(batch.sequences) if not s.is_exhausted]]
                inputs = decode_inputs(rows, tables, _unseen_ids(batch, rows), self.options.device)
                logits = self.runner.forward(inputs.model, self.cache)
                step = self._draw(batch, rows, logits, started_ns)
        step.concat_ns = concat_ns
        return lambda: self._finish(step)

    def filter(self, batch_id: int, request_ids: list[int], numbered: bool) -> CachedBatch | None:
        """Reduce a batch to the named requests; None (only for a numbered call) when nothing of it is left.

        Raises RequestError, UnknownBatchError, BatchGoneError.
        """
        if not request_ids:
            raise RequestError("Batch must have at least one request")
        batch = self._store.find(batch_id) if numbered else self._store.get(batch_id)
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

    # -- the halves of a step ------------------------------------------------------------------------------------

    def _sequences(
        self, requests: list[NewRequest], prompts: list[list[int]]
    ) -> tuple[list[Sequence], list[Generation]]:
        """Sequences of the requests that can run, and this rank's answers to those that cannot.

        Raises RequestError for an empty batch, and for any bad request of a stock router, which knows no row errors.
        """
        if not requests:
            raise RequestError("Batch must have at least one request")
        sequences, refused = [], []
        for request, prompt in zip(self._with_places(requests, prompts), prompts, strict=True):
            try:
                check_layout(request, prompt, self.options.block_size, self.cache.num_blocks)
                sequences.append(self._sequence(request, prompt))
            except (RequestError, ValueError) as error:
                if self.stock_router:
                    raise
                if self._owns(request.id):
                    refused.append(Generation(request_id=request.id, error=str(error)))
        return sequences, refused

    def _owns(self, request_id: int) -> bool:
        return request_id % self.options.world_size == self.options.rank

    def _with_places(self, requests: list[NewRequest], prompts: list[list[int]]) -> list[NewRequest]:
        if all(len(r.blocks) for r in requests):
            return requests
        tokens = [len(p) + r.stopping.max_new_tokens - 1 for r, p in zip(requests, prompts, strict=True)]
        places = number_blocks(tokens, self.options.block_size)
        return [
            dataclasses.replace(r, blocks=blocks, slots=slots)
            for r, (blocks, slots) in zip(requests, places, strict=True)
        ]

    def _sequence(self, request: NewRequest, prompt: list[int]) -> Sequence:
        if max(prompt) >= self.runner.vocab_size:
            raise RequestError(f"request {request.id}: the tokenizer has ids that the model has no row for")
        grammar = request.sampling.grammar
        owned = self._owns(request.id)
        follows_text = owned or bool(request.stopping.stop_sequences)
        return Sequence(
            request,
            list(prompt),
            row=self._sampler.new_row(
                request.sampling,
                prompt,
                request.stopping.max_new_tokens,
                request.top_n_tokens,
                grammar=self._grammars.start(grammar) if grammar is not None else None,
            ),
            stopping=StoppingState(request.stopping, self.tokenizer.eos_token_ids),
            detokenizer=Detokenizer(self.tokenizer, prompt) if follows_text else None,
            owned=owned,
            prefill_logprobs=request.prefill_logprobs and self.options.prompt_logprobs_allowed,
        )

    def _merge(self, batches: list[Batch]) -> tuple[Batch, int | None]:
        if len(batches) == 1:
            return batches[0], None
        started_ns = time.time_ns()
        first = batches[0]
        for other in batches[1:]:
            first.extend(other)
            self._store.remove(other.id)
        return first, time.time_ns() - started_ns

    def _draw(self, batch: Batch, rows: list[Sequence], logits: Tensor, started_ns: int) -> LaunchedStep:
        sampled = self._sampler.sample(logits, [s.row for s in rows])
        for sequence in rows:
            sequence.advance()
        step = LaunchedStep(batch, rows, sampled, started_ns)
        batch.launched = step
        return step

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
            return self._fail_row(step, sequence, sequence.row.why_failed)
        try:
            text, ended = sequence.append(host.ids[index])
            special = self.tokenizer.special_ids
            token_id = host.ids[index]
            return Generation(
                request_id=sequence.id,
                tokens=Tokens([token_id], [host.logprobs[index]], [text], [token_id in special]),
                prefill_tokens=self._prompt_tokens(step, sequence),
                top_tokens=[self._top_tokens(host.top[index])] if sequence.top_n_tokens else [],
                generated_text=ended,
            )
        except Exception as error:
            if self.options.world_size == 1:
                sequence.finished = True
            else:
                sequence.disown()
            return self._fail_row(step, sequence, f"{type(error).__name__}: {error}")

    def _fail_row(self, step: LaunchedStep, sequence: Sequence, reason: str) -> Generation:
        if self.stock_router:
            self._store.lose(step.batch.id)
            raise RequestError(reason)
        return Generation(request_id=sequence.id, error=reason)

    def _top_tokens(self, candidates: list[tuple[int, float]]) -> Tokens:
        ids = [token_id for token_id, _ in candidates]
        return Tokens(
            ids=ids,
            logprobs=[logprob for _, logprob in candidates],
            texts=[self.tokenizer.decode_one(i) for i in ids],
            is_special=[i in self.tokenizer.special_ids for i in ids],
        )

    def _prompt_tokens(self, step: LaunchedStep, sequence: Sequence) -> Tokens | None:
        if step.prefill is None or sequence.id not in step.prefill.values or not sequence.owned:
            return None
        known: list[float] = step.prefill.values[sequence.id].tolist()
        ids = sequence.ids[: sequence.prompt_length]
        unknown = [float("nan")] * (sequence.prompt_length - len(known))
        return Tokens(ids, unknown + known, [self.tokenizer.decode_one(i) for i in ids], [])

    @contextlib.contextmanager
    def _losing_on_error(self, batch: Batch) -> Iterator[None]:
        """Whatever goes wrong in a step, its batch is gone: sequences and cache may disagree."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._store.lose(batch.id)
            torch.cuda.empty_cache()
            raise OutOfMemoryError(
                "out of memory in one step; lower --max-batch-prefill-tokens or --max-batch-size"
            ) from error
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


def _collect_prompt_logprobs(sequences: list[Sequence], inputs: StepInputs, logits: Tensor) -> PrefillLogprobs | None:
    """Row j of a prompt's logits scores its token j + 1."""
    if inputs.last_rows is None:
        return None
    collected = PrefillLogprobs()
    start = 0
    for sequence in sequences:
        if not sequence.prefill_logprobs:
            start += 1
            continue
        first, count = sequence.cache_length, sequence.input_length
        following = torch.tensor(sequence.ids[first + 1 : first + count], dtype=torch.int64, device=logits.device)
        collected.values[sequence.id] = prompt_logprobs(logits[start : start + count - 1], following)
        start += count
    return collected
