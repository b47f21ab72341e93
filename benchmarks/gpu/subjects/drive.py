"""An engine as the shard has one, and requests as the router sends them, without router and shard.

Rows of a long context cost no prefill here: their first tokens are declared cached, and the cache is full of random
numbers. That is the path of a prefix found in the cache, computed to its last token.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.subjects.synthetic import engine_tokenizer
from model_server.batch.results import StepResult
from model_server.batch.sequence import NewRequest
from model_server.engine.calls import DecodeCall, PrefillCall
from model_server.engine.engine import Engine, EngineOptions
from model_server.memory.kv_cache import KvCache
from model_server.runner.runner import Runner
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer

GREEDY = SamplingParameters()
Chooser = Callable[[int], SamplingParameters]


def make_engine(runner: Runner, device: torch.device, tokenizer: Tokenizer | None = None) -> Engine:
    """One rank, without a cache yet."""
    options = EngineOptions(
        device=device, block_size=runner.traits.block_size, prompt_logprobs_allowed=False,
        chunking=True,
    )  # fmt: skip
    sampler = Sampler(runner.vocab_size, device)
    engine = Engine(runner, tokenizer or engine_tokenizer(runner.vocab_size), sampler, options)
    return engine


def random_cache(engine: Engine, num_blocks: int, dtype: torch.dtype) -> None:
    """A cache full of random numbers."""
    device = engine.options.device
    engine.set_cache(None)
    cache = KvCache(engine.runner.kv_shapes, num_blocks, engine.options.block_size, dtype, device)
    for rows in cache.rows:
        rows.normal_()
    engine.set_cache(cache)


class Blocks:
    """Hands out the blocks of a cache in random order, block 0 never."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self._size = block_size
        self._all = np.random.default_rng(seed).permutation(np.arange(1, num_blocks, dtype=np.int32))
        self._next = 0

    def reset(self) -> None:
        self._next = 0

    def take(self, tokens: int) -> np.ndarray:
        """Return blocks for so many tokens."""
        count = -(-tokens // self._size)
        blocks = self._all[self._next : self._next + count]
        if len(blocks) < count:
            raise ValueError(f"{tokens} tokens do not fit what is left of the cache")
        self._next += count
        return blocks


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps of one batch. intervals: seconds between the ends of steps on the device (on a CPU: on the host); host:
    seconds that each call took to launch."""

    intervals: list[float]
    host: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.intervals)


class Driver:
    """Batches of one engine, one at a time."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self._ids = itertools.count()
        self._calls = itertools.count(1)
        self._random = np.random.default_rng(seed)
        self.blocks = Blocks(engine.cache.num_blocks, engine.options.block_size, seed)

    def request(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        cached: int = 0,
        chunk: int | None = None,
        sampling: SamplingParameters = GREEDY,
        blocks: np.ndarray | None = None,
    ) -> NewRequest:
        """blocks: None: new ones."""
        if blocks is None:
            blocks = self.blocks.take(len(prompt) + new_tokens)
        return NewRequest(
            id=next(self._ids), sampling=sampling,
            stopping=StoppingParameters(max_new_tokens=new_tokens, ignore_eos_token=True), prefill_logprobs=False,
            top_n_tokens=0, blocks=blocks, cache_len=cached, chunk_len=chunk, input_ids=tuple(prompt),
        )  # fmt: skip

    def random_prompt(self, length: int) -> list[int]:
        """Ids above the special ones."""
        return [int(i) for i in self._random.integers(2, self.engine.runner.vocab_size, length)]

    def next_call(self) -> int:
        """The number of a call, as the router counts them."""
        return next(self._calls)

    def prefill(self, requests: list[NewRequest], batch_id: int = 0) -> StepResult:
        call = PrefillCall(batch_id=batch_id, sequence=self.next_call())
        return self.engine.submit_prefill(call, requests)()

    def rows_at(self, batch: int, context: int, new_tokens: int, sampling: Chooser = lambda _: GREEDY) -> int:
        """Start a batch whose rows have `context` tokens, all but the last one cached; its id."""
        self.engine.clear(None)
        self.blocks.reset()
        prompts = [self.random_prompt(context) for _ in range(batch)]
        requests = [
            self.request(p, new_tokens, cached=context - 1, sampling=sampling(i)) for i, p in enumerate(prompts)
        ]
        _refuse_errors(self.prefill(requests))
        return 0

    def decode(self, batch_id: int = 0) -> StepResult:
        return self.engine.submit_decode(DecodeCall(batch_ids=(batch_id,), sequence=self.next_call()))()

    def pace(self, batch_id: int, steps: int) -> Pace:
        """Run steps, each submitted before the one before it is read where the engine allows that."""
        engine = self.engine
        on_cuda = engine.options.device.type == "cuda"
        ends: list[torch.cuda.Event] = []
        times: list[float] = []
        host: list[float] = []
        waiting: Callable[[], StepResult] | None = None
        for _ in range(steps + 1):
            # As the router numbers its calls when it does not wait for an answer before it sends the next.
            step = DecodeCall(batch_ids=(batch_id,), sequence=self.next_call(), unanswered=int(waiting is not None))
            if waiting is not None and not engine.may_overlap(step):
                _refuse_errors(waiting())
                waiting = None
            called = time.perf_counter()
            submitted = engine.submit_decode(step)
            host.append(time.perf_counter() - called)
            if on_cuda:
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
            if waiting is not None:
                _refuse_errors(waiting())
            waiting = submitted
            times.append(time.perf_counter())
        assert waiting is not None
        _refuse_errors(waiting())
        if on_cuda:
            torch.cuda.synchronize(engine.options.device)
            intervals = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(ends)]
        else:
            intervals = [b - a for a, b in itertools.pairwise(times)]
        return Pace(intervals, host)

    def generate(self, requests: list[NewRequest]) -> dict[int, list[int]]:
        """Run requests to their ends: the ids of each, in the order of the requests."""
        found: dict[int, list[int]] = {r.id: [] for r in requests}
        result = self.prefill(requests)
        while True:
            for generation in result.generations:
                if generation.error is not None:
                    raise RuntimeError(generation.error)
                assert generation.tokens is not None
                found[generation.request_id] += generation.tokens.ids
            if result.batch is None:
                return found
            result = self.decode()


def _refuse_errors(result: StepResult) -> None:
    for generation in result.generations:
        if generation.error is not None:
            raise RuntimeError(f"a row failed: {generation.error}")
