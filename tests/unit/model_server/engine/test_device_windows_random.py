"""Random routers over windows that the device makes: growth, preemption, ends inside windows, steps ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.device_windows import Dice, guessing, on_a_gpu
from support.drafts import speculator_of
from support.effort import examples
from support.engine_shard import BLOCK, EngineShard
from unit.model_server.engine.test_engine_random import Router, drive, noted

from model_server.batch.growth import BlockGrowth
from model_server.engine.engine import Engine
from model_server.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class WindowRouter(Router):
    """Gives a request blocks for the next step's first token, whatever the step in flight may bring, and no more."""

    most = 5

    def _growth(self) -> list[BlockGrowth]:
        growth = []
        for request_id in self.running:
            in_flight = (1 + self.most) * (self._waiting is not None)
            needed = len(self.shard.prompts[request_id]) + len(self.said[request_id]) + in_flight
            missing = -(-needed // BLOCK) - len(self.tables[request_id])
            if missing > 0:
                more = self._blocks(missing + self.dice.randint(0, 1))
                self.tables[request_id] += more
                growth.append(BlockGrowth(request_id, np.array(more, np.int64)))
        return growth


def speculating(tokenizer: Tokenizer, seed: int, budget: int, rank: int = 0, world_size: int = 1) -> EngineShard:
    dice = random.Random(seed)
    drafter = dice.choice([None, *(guessing(tokenizer.vocab_size, random.Random(seed), w) for w in (0.0, 0.2, 1.0))])
    speculator = Dice(WindowRouter.most, random.Random(seed), drafter, alone=world_size == 1)
    return on_a_gpu(tokenizer, speculator, budget=budget, rank=rank, world_size=world_size)


@pytest.mark.random
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("seed", range(examples(2, 6)))
def test_whatever_a_router_does_each_request_says_what_it_says_alone(
    tiny_tokenizer: Tokenizer, seed: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_runs_ahead", ahead)
    dice = random.Random(seed)
    shard = speculating(tiny_tokenizer, seed, dice.choice([1, 3, 8, 40, 1000]))
    router = WindowRouter([shard], dice, ahead=ahead)
    drive(router, tiny_tokenizer)
    speculator = speculator_of(shard.engine)
    assert isinstance(speculator, Dice)
    if not router.has_grammars:  # these need the host
        assert (router.num_ahead > 3) is ahead and speculator.num_windows > 0


@pytest.mark.random
def test_ranks_compute_the_same_rows_whenever_a_call_comes_to_each(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    for seed in range(examples(1, 5)):
        dice = random.Random(3000 + seed)
        budget = dice.choice([1, 3, 8, 40, 1000])
        ranks = [speculating(tiny_tokenizer, seed, budget, rank, 2) for rank in range(2)]
        forwards = [noted(rank) for rank in ranks]
        router = WindowRouter(ranks, dice, ahead=True)
        drive(router, tiny_tokenizer)
        assert all(one == forwards[0] for one in forwards), seed
