"""Random routers: requests join, grow, are preempted and leave at any time, and each says what it says alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.engine_shard import BLOCK, EngineShard, decode_call, tokens_of
from support.graph_doubles import CapturableRunner, PlainGraphCapture, copying_staging

from model_server.batch.extension import BlockExtension
from model_server.batch.sequence import NewRequest
from model_server.distributed.group import ProcessGroup
from model_server.engine.calls import DecodeCall, PrefillCall
from model_server.engine.engine import Collect, Engine
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.sampling.parameters import SamplingParameters
from model_server.text.tokenizer import Tokenizer

NUM_BLOCKS = 256


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Router:
    """Gives blocks when a request needs them, in random order, and takes them back at once."""

    def __init__(self, shard: EngineShard, dice: random.Random, *, ahead: bool = False) -> None:
        """ahead: a call may be submitted before the one before it has been collected."""
        self.shard = shard
        self._ahead = ahead
        self._waiting: tuple[Collect, list[int]] | None = None  # and who took part
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
        request = self.shard.request(prompt, self.dice.randint(1, 25), tokens=1, sampling=sampling)
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
            slots=(table[:, None] * BLOCK + np.arange(BLOCK)).ravel().astype(np.int64),
            resume_ids=tuple(said),
            chunk_len=self.dice.choice([None, self.dice.randint(1, length)]),
        )
        growth = self._growth()
        self.batch_ids += 1
        cached = 0 if self.batch_ids > 1 else None
        batch_id = self.batch_ids if cached is not None else 0
        self.running.append(request.id)
        call = PrefillCall(batch_id=batch_id, cached_id=cached, sequence=0, extensions=tuple(growth))
        prompts = [self.shard.prompts[request.id]]
        self._step(call, lambda: self.shard.engine.submit_prefill(call, [placed], prompts))

    def decode(self) -> None:
        call = decode_call(0, extensions=self._growth())
        self._step(call, lambda: self.shard.engine.submit_decode(call))

    def settle(self) -> None:
        """Take the answer that is waited for."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._take(*waiting)
        self.free, self._ended = self.free + self._ended, []

    def _step(self, call: PrefillCall | DecodeCall, submit: Callable[[], Collect]) -> None:
        """As the device thread does it; now and then the next call comes too late to be submitted ahead."""
        if self._waiting is not None and not (self.shard.engine.may_overlap(call) and self.dice.random() < 0.8):
            self.settle()
        before, self._waiting = self._waiting, (submit(), list(self.running))
        self.free, self._ended = self.free + self._ended, []
        if before is not None:
            self.num_ahead += 1
            self._take(*before)
        if not self._ahead:
            self.settle()

    def leave(self, request_id: int) -> None:
        self.running.remove(request_id)
        self.free += self.tables.pop(request_id)
        if self.running:
            self.shard.engine.filter(0, self.running, numbered=True)
        else:
            self.shard.engine.clear(0)

    def _blocks(self, count: int) -> list[int]:
        self.dice.shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _growth(self) -> list[BlockExtension]:
        growth = []
        for request_id in self.running:
            # With this step's token, and perhaps one of the step in flight.
            written = len(self.shard.prompts[request_id]) + len(self.said[request_id]) + (self._waiting is not None)
            if written > BLOCK * len(self.tables[request_id]):
                more = self._blocks(self.dice.randint(1, 2))
                self.tables[request_id] += more
                growth.append(BlockExtension(request_id, np.array(more, np.int64)))
        return growth

    def _take(self, collect: Collect, members: list[int]) -> None:
        result = collect()
        for request_id, ids in tokens_of(result).items():
            self.said[request_id] += ids
        kept = set(result.batch.request_ids) if result.batch is not None else set()
        assert kept <= set(members), "an answer tells of requests that joined later"
        for request_id in [i for i in self.running if i in members and i not in kept]:
            self.running.remove(request_id)
            self._ended += self.tables.pop(request_id)


def as_on_a_gpu(tokenizer: Tokenizer, budget: int) -> EngineShard:
    """Replayed decode steps, inputs that the device counts up, uploads through buffers."""
    runner = GraphedRunner(CapturableRunner(vocab_size=tokenizer.vocab_size), (4, 2, 1), PlainGraphCapture())
    shard = EngineShard(tokenizer, budget=budget, extends_blocks=True, num_blocks=NUM_BLOCKS, runner=runner)  # type: ignore[arg-type]
    runner.capture(shard.engine.cache, 64, ProcessGroup())
    shard.engine._stepper._staging = copying_staging()
    return shard


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(25))
def test_whatever_a_router_does_each_request_says_what_it_says_alone(
    tiny_tokenizer: Tokenizer, seed: int, device: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_runs_ahead", ahead)
    dice = random.Random(seed)
    budget = dice.choice([1, 3, 8, 40, 1000])
    if device == "gpu":
        shard = as_on_a_gpu(tiny_tokenizer, budget)
    else:
        shard = EngineShard(tiny_tokenizer, budget=budget, extends_blocks=True, num_blocks=NUM_BLOCKS)
    router = Router(shard, dice, ahead=ahead)
    gone = set()
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
    assert (router.num_ahead > 10) is ahead
    for request_id, request in router.requests.items():
        alone = EngineShard(tiny_tokenizer)
        plain = alone.request(router.shard.prompts[request_id], request.stopping.max_new_tokens)
        plain = dataclasses.replace(plain, sampling=request.sampling)
        expected = tokens_of(*alone.run_out(alone.prefill(0, plain), 0))[plain.id]
        said = router.said[request_id]
        assert said == (expected[: len(said)] if request_id in gone else expected)
    assert sorted(router.free) == list(range(1, NUM_BLOCKS))
