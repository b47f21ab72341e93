"""Random routers: requests join, grow, are preempted and leave at any time, and each says what it says alone."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.effort import examples
from support.engine_shard import BLOCK, EngineShard, sleeping_grammar, tokens_of
from support.graph_doubles import CapturableRunner, PlainGraphCapture, copying_staging

from model_server.batch.growth import BlockGrowth
from model_server.batch.results import StepResult
from model_server.batch.sequence import NewRequest
from model_server.distributed.group import ProcessGroup
from model_server.engine.calls import DecodeCall, PrefillCall
from model_server.engine.device_thread import DeviceThread, Job, whole
from model_server.engine.engine import Collect, Engine
from model_server.memory.kv_cache import KvCache
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.runner import ModelInputs
from model_server.sampling.parameters import Grammar, SamplingParameters, StoppingParameters
from model_server.text.tokenizer import Tokenizer

NUM_BLOCKS = 256
LIMIT_S = 60
GRAMMARS = [
    Grammar("regex", "[a-z]+ [0-9]{2,9}"),
    Grammar("json", '{"type": "array", "items": {"type": "integer"}}'),
    sleeping_grammar("e", "/[a-z]{0,9}/"),
    sleeping_grammar(30, "/[0-9]{2,9}/"),
]
Call = PrefillCall | DecodeCall


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Router:
    """Gives blocks when a request needs them, in random order, and takes them back at once."""

    def __init__(self, ranks: list[EngineShard], dice: random.Random, *, ahead: bool = False) -> None:
        """ahead: a call may be submitted before the one before it has been collected."""
        self.ranks = ranks
        self.shard = ranks[0]
        self._ahead = ahead
        self.has_grammars = dice.random() < 0.4
        self._waiting: tuple[list[Collect], list[int]] | None = None  # and who took part
        self._number = 0
        self._ended: list[int] = []  # blocks that the step in flight may still write
        self.num_ahead = 0
        self.dice = dice
        self.free = list(range(1, NUM_BLOCKS))
        self.tables: dict[int, list[int]] = {}
        self.requests: dict[int, NewRequest] = {}
        self.running: list[int] = []
        self.preempted: list[int] = []
        self.said: dict[int, list[int]] = {}
        self.batch_ids = 0

    def new(self) -> NewRequest:
        prompt = [self.dice.randrange(60) for _ in range(self.dice.randint(1, 30))]
        sampling = SamplingParameters()
        if self.dice.random() < 0.5:
            sampling = SamplingParameters(
                do_sample=True, temperature=9.0, seed=self.dice.randrange(99), presence_penalty=3.0
            )
        if self.has_grammars and self.dice.random() < 0.4:
            sampling = dataclasses.replace(sampling, grammar=self.dice.choice(GRAMMARS))
        stops = [
            self.shard.engine.tokenizer.decode_one(self.dice.randrange(60)) for _ in range(self.dice.randint(0, 8))
        ]
        stopping = StoppingParameters(
            max_new_tokens=self.dice.randint(1, 25),
            ignore_eos_token=True,
            stop_sequences=tuple(stops),
        )
        request = self.shard.request(prompt, 1, tokens=1, sampling=sampling, stopping=stopping)
        self.requests[request.id] = request
        self.said[request.id] = []
        return request

    def join(self, request: NewRequest) -> None:
        said = self.said[request.id]
        length = len(self.shard.prompts[request.id]) + len(said)
        self.tables[request.id] = self._blocks(-(-length // BLOCK))
        table = np.array(self.tables[request.id], np.int32)
        placed = dataclasses.replace(
            request,
            blocks=table,
            resume_ids=tuple(said),
            chunk_len=self.dice.choice([None, self.dice.randint(1, length)]),
        )
        growth = self._growth()
        self.batch_ids += 1
        cached = 0 if self.batch_ids > 1 else None
        batch_id = self.batch_ids if cached is not None else 0
        self.running.append(request.id)
        call = PrefillCall(batch_id=batch_id, cached_id=cached, sequence=0, new_blocks=tuple(growth))
        self._step(call, lambda engine, call: engine.submit_prefill(call, [placed]))

    def decode(self) -> None:
        call = DecodeCall(batch_ids=(0,), sequence=0, new_blocks=tuple(self._growth()))
        self._step(call, lambda engine, call: engine.submit_decode(call))

    def settle(self) -> None:
        """Take the answer that is waited for."""
        if self._waiting is not None:
            (collects, members), self._waiting = self._waiting, None
            self._take([collect() for collect in collects], members)
        self.free, self._ended = self.free + self._ended, []

    def _step(self, call: Call, submit: Callable[[Engine, Any], Collect]) -> None:
        call = dataclasses.replace(call, sequence=self._next_number(), unanswered=int(self._waiting is not None))
        before, self._waiting = self._waiting, None
        collects, results = self._submit(call, submit, before[0] if before is not None else [])
        self._waiting = collects, list(self.running)
        self.free, self._ended = self.free + self._ended, []
        if before is not None:
            self._take(results, before[1])
        if not self._ahead:
            self.settle()

    def _submit(
        self, call: Call, submit: Callable[[Engine, Any], Collect], before: list[Collect]
    ) -> tuple[list[Collect], list[StepResult]]:
        """As the device threads do it; now and then the call comes to a rank too late to be submitted ahead. before:
        collects the step before it on each rank. Returns the same for this one, and what the one before brought."""
        after, results = [], []
        for index, rank in enumerate(self.ranks):
            may_overlap = not before or rank.engine.may_overlap(call)
            if before and not (may_overlap and self.dice.random() < 0.8):
                results.append(before[index]())
                after.append(submit(rank.engine, call))
                continue
            after.append(submit(rank.engine, call))
            if before:
                self.num_ahead += 1
                results.append(before[index]())
        return after, results

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def leave(self, request_id: int) -> None:
        self.running.remove(request_id)
        self.free += self.tables.pop(request_id)
        number = self._next_number()
        if self.running:
            kept = list(self.running)
            self._on_ranks(number, lambda engine: engine.filter(0, kept))
        else:
            self._on_ranks(number, lambda engine: engine.clear(0))

    def _on_ranks(self, number: int, work: Callable[[Engine], object]) -> None:
        for rank in self.ranks:
            work(rank.engine)

    def _blocks(self, count: int) -> list[int]:
        self.dice.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _growth(self) -> list[BlockGrowth]:
        growth = []
        for request_id in self.running:
            # With this step's token, and perhaps one of the step in flight.
            written = len(self.shard.prompts[request_id]) + len(self.said[request_id]) + (self._waiting is not None)
            if written > BLOCK * len(self.tables[request_id]):
                more = self._blocks(self.dice.randint(1, 2))
                self.tables[request_id] += more
                growth.append(BlockGrowth(request_id, np.array(more, np.int64)))
        return growth

    def _take(self, results: list[StepResult], members: list[int]) -> None:
        for result in results:
            for request_id, ids in tokens_of(result).items():
                self.said[request_id] += ids
        kept, *others = [set(one.batch.request_ids) if one.batch is not None else set() for one in results]
        assert all(other == kept for other in others), "the ranks disagree"
        assert kept <= set(members), "an answer tells of requests that joined later"
        for request_id in [i for i in self.running if i in members and i not in kept]:
            self.running.remove(request_id)
            self._ended += self.tables.pop(request_id)


class RouterOfThreads(Router):
    """Every rank has a device thread, to which calls come when they like, and a device that takes some time."""

    def __init__(self, ranks: list[EngineShard], dice: random.Random, threads: list[DeviceThread]) -> None:
        super().__init__(ranks, dice, ahead=True)
        self.threads = threads

    def _submit(
        self, call: Call, submit: Callable[[Engine, Any], Collect], before: list[Collect]
    ) -> tuple[list[Collect], list[StepResult]]:
        futures = {}
        for index in self.dice.sample(range(len(self.ranks)), len(self.ranks)):
            time.sleep(self.dice.choice([0, 0, 1e-3]))
            job = self._job(self.ranks[index].engine, call, submit, self.dice.choice([0, 1e-3, 3e-3]))
            futures[index] = self.threads[index].enqueue(job, call.sequence)
        after = [partial(futures[index].result, LIMIT_S) for index in range(len(self.ranks))]
        return after, [collect() for collect in before]

    def _job(
        self, engine: Engine, call: Call, submit: Callable[[Engine, Any], Collect], takes_s: float
    ) -> Job[StepResult]:
        times: list[float] = []

        def begin() -> Collect:
            times.append(time.monotonic())
            return submit(engine, call)

        def overlaps() -> bool:
            yes = engine.may_overlap(call)
            self.num_ahead += yes
            return yes

        return Job(begin, overlaps, lambda: time.monotonic() - times[0] >= takes_s)

    def _on_ranks(self, number: int, work: Callable[[Engine], object]) -> None:
        jobs = [whole(partial(work, rank.engine)) for rank in self.ranks]
        for job in [thread.enqueue(job, number) for thread, job in zip(self.threads, jobs, strict=True)]:
            job.result(LIMIT_S)


def as_on_a_gpu(tokenizer: Tokenizer, budget: int, rank: int = 0, world_size: int = 1) -> EngineShard:
    """Replayed decode steps, inputs that the device counts up, uploads through buffers."""
    runner = GraphedRunner(CapturableRunner(vocab_size=tokenizer.vocab_size), (4, 2, 1), PlainGraphCapture())
    shard = EngineShard(
        tokenizer, rank=rank, world_size=world_size, budget=budget, grows=True, num_blocks=NUM_BLOCKS,
        runner=runner,  # type: ignore[arg-type]
    )  # fmt: skip
    runner.capture(shard.engine.cache, 64, ProcessGroup())
    shard.engine.steps.staging = copying_staging()
    return shard


@pytest.mark.random
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(examples(3, 10)))
def test_whatever_a_router_does_each_request_says_what_it_says_alone(
    tiny_tokenizer: Tokenizer, seed: int, device: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_runs_ahead", ahead)
    dice = random.Random(seed)
    budget = dice.choice([1, 3, 8, 40, 1000])
    if device == "gpu":
        shard = as_on_a_gpu(tiny_tokenizer, budget)
    else:
        shard = EngineShard(tiny_tokenizer, budget=budget, grows=True, num_blocks=NUM_BLOCKS)
    router = Router([shard], dice, ahead=ahead)
    drive(router, tiny_tokenizer)
    assert (router.num_ahead > 10) is ahead


@pytest.mark.random
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_compute_the_same_rows_whenever_a_call_comes_to_each(
    tiny_tokenizer: Tokenizer, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, positions and slots of every forward are those of the other ranks, and so are the shapes of collectives."""
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    for seed in range(examples(1, 8)):
        dice = random.Random(1000 * world_size + seed)
        budget = dice.choice([1, 3, 8, 40, 1000])
        ranks = [as_on_a_gpu(tiny_tokenizer, budget, rank, world_size) for rank in range(world_size)]
        forwards = [noted(rank) for rank in ranks]
        router = Router(ranks, dice, ahead=True)
        drive(router, tiny_tokenizer)
        assert all(one == forwards[0] for one in forwards), seed
        assert router.num_ahead > 10


@pytest.mark.random
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_meet_in_the_same_collectives_whatever_is_late(
    tiny_tokenizer: Tokenizer, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device threads and gloo: a sum of other rows, or of fewer, is an error."""
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    for seed in range(examples(1, 10)):
        dice = random.Random(2000 * world_size + seed)
        ranks = [as_on_a_gpu(tiny_tokenizer, 8, rank, world_size) for rank in range(world_size)]
        join_by_gloo(ranks)
        threads = [DeviceThread(torch.inference_mode, print, lambda error: True) for _ in ranks]
        for thread in threads:
            thread.reset(1)
            thread.start()
        try:
            router = RouterOfThreads(ranks, dice, threads)
            drive(router, tiny_tokenizer)
        finally:
            for thread in threads:
                thread.stop(LIMIT_S)
        assert router.num_ahead > 10


def join_by_gloo(ranks: list[EngineShard]) -> None:
    """Every forward of a rank to come begins with a sum over all ranks, whose terms must be the same."""
    store, size = dist.HashStore(), len(ranks)

    def joined(index: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, index, size, timedelta(seconds=LIMIT_S))

    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(joined, range(size)))
    for rank, group in zip(ranks, groups, strict=True):
        rank.engine.runner.forward = partial(summed, rank.engine.runner.forward, group)  # type: ignore[method-assign]


def summed(
    forward: Callable[..., torch.Tensor], group: dist.ProcessGroupGloo, inputs: ModelInputs, cache: KvCache
) -> torch.Tensor:
    terms = torch.cat([inputs.positions, inputs.attention.slots]).double()
    total = terms.clone()
    group.allreduce([total]).wait()
    assert torch.equal(total, terms * group.size()), "the ranks compute different rows"
    return forward(inputs, cache)


def noted(rank: EngineShard) -> list[tuple[list[int], list[int], int]]:
    """Positions, slots and number of logits of each forward to come."""
    runner, seen = rank.engine.runner, []
    forward = runner.forward

    def noting(inputs: ModelInputs, cache: KvCache) -> torch.Tensor:
        rows = len(inputs.positions) if inputs.logit_rows is None else len(inputs.logit_rows)
        seen.append((inputs.positions.tolist(), inputs.attention.slots.tolist(), rows))
        return forward(inputs, cache)

    runner.forward = noting  # type: ignore[method-assign]
    return seen


def drive(router: Router, tokenizer: Tokenizer, alone_on: Callable[[Tokenizer], EngineShard] = EngineShard) -> None:
    """Random calls until all is said, and what was said against each request alone."""
    dice, gone = router.dice, set()
    for _ in range(60):
        choice = dice.random()
        joins = choice < 0.25 and len(router.running) < 6
        if choice < 0.4 and not joins:
            router.settle()  # a FilterBatch waits for the step before it
        if joins:
            again = router.preempted and dice.random() < 0.7
            router.join(router.requests[router.preempted.pop(0)] if again else router.new())
        elif choice < 0.35 and router.running:
            router.preempted.append(victim := router.running[-1])
            router.leave(victim)
        elif choice < 0.4 and router.running:
            gone.add(victim := dice.choice(router.running))
            router.leave(victim)
        elif router.running:
            router.decode()
    while router.running or router.preempted:
        if router.preempted:
            router.join(router.requests[router.preempted.pop(0)])
        else:
            router.decode()
    router.settle()
    router.settle()
    for request_id, request in router.requests.items():
        alone = alone_on(tokenizer)
        plain = alone.request(router.shard.prompts[request_id], request.stopping.max_new_tokens)
        plain = dataclasses.replace(plain, sampling=request.sampling, stopping=request.stopping)
        expected = tokens_of(*alone.run_out(alone.prefill(0, plain), 0))[plain.id]
        said = router.said[request_id]
        assert said == (expected[: len(said)] if request_id in gone else expected)
    assert sorted(router.free) == list(range(1, NUM_BLOCKS))
