"""Random routers over windows that the host makes: growth, preemption, chunks, grammars, ends inside windows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from support.device_windows import NUM_BLOCKS
from support.drafts import use_drafts
from support.effort import examples
from support.engine_shard import EngineShard
from support.fake_model import next_token
from unit.model_server.engine.test_device_windows_random import WindowRouter
from unit.model_server.engine.test_engine_random import drive

from model_server.batch.sequence import Sequence
from model_server.features.drafts.pace import Pace
from model_server.features.drafts.speculator import Compute, Draft, Drafting, Speculator
from model_server.features.drafts.window import Window
from model_server.text.tokenizer import Tokenizer

PACES = [Pace([(1, 1.0)]), Pace([(1, 1.0), (2, 2.0)]), Pace([(1, 1.0), (8, 1.5), (16, 9.0)])]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class HostDice(Speculator):
    """Another pace in each step. wrong: the share of wrong tokens in its drafts of what the fake model says next; None:
    it drafts by lookup."""

    def __init__(self, most: int, dice: random.Random, vocab_size: int, wrong: float | None) -> None:
        super().__init__(most)
        self.dice, self.vocab_size, self.wrong, self.num_windows = dice, vocab_size, wrong, 0

    def window(self, rows: list[Sequence], compute: Compute | None = None) -> Window | None:
        self.pace = self.dice.choice(PACES)
        found = super().window(rows, compute)
        self.num_windows += found is not None
        return found

    def _draft(self, sequence: Sequence, drafting: Drafting) -> Draft:
        if self.wrong is None:
            return super()._draft(sequence, drafting)
        ids = list(sequence.ids)
        for _ in range(self.dice.randint(0, self.longest(sequence))):
            is_wrong = self.dice.random() < self.wrong
            ids.append(self.dice.randrange(self.vocab_size) if is_wrong else next_token(ids, self.vocab_size))
        draft, grammar = ids[len(sequence.ids) :], sequence.row.grammar
        return Draft(draft if grammar is None else grammar.possible(draft))


@pytest.mark.parametrize("seed", range(examples(8, 80)))
def test_whatever_a_router_does_each_request_says_what_it_says_alone(tiny_tokenizer: Tokenizer, seed: int) -> None:
    dice = random.Random(seed)
    shard = EngineShard(tiny_tokenizer, budget=dice.choice([1, 3, 8, 40, 1000]), grows=True, num_blocks=NUM_BLOCKS)
    wrong = (None, 0.0, 0.2, 1.0)[seed % 4]
    speculator = HostDice(dice.choice([1, 2, 3, 5, 8]), dice, tiny_tokenizer.vocab_size, wrong)
    use_drafts(shard.engine, speculator)
    drive(WindowRouter([shard], dice), tiny_tokenizer)
    assert speculator.num_windows > 0 or wrong is None
