"""Engines that draft on a device that there is not: windows of random lengths, replayed and copied as on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from support.drafts import use_drafts
from support.engine_shard import EngineShard
from support.fake_model import next_token
from support.graph_doubles import CapturableRunner, PlainGraphCapture, copying_staging
from torch import Tensor

from model_server.batch.sequence import Sequence
from model_server.distributed.group import ProcessGroup
from model_server.features.drafts.device.speculator import BatchWindows, DeviceSpeculator
from model_server.features.drafts.pace import Pace
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
FREE = Pace([(1, 1.0)])
NUM_BLOCKS = 256


class Dice(DeviceSpeculator):
    """Windows of any length, another one in each step. guess: the drafts, instead of what was said before."""

    def __init__(
        self, most: int, dice: random.Random, guess: Callable[..., tuple[Tensor, Tensor]] | None, *, alone: bool = True
    ) -> None:
        super().__init__(most, 128, CPU, 4, alone=alone)
        self.pace, self.dice, self.num_windows = FREE, dice, 0
        if guess is not None:
            self._look_up = guess

    def length(self, windows: BatchWindows, rows: list[Sequence]) -> int:
        length = self.dice.randint(0, self.most)
        self.num_windows += length > 0
        return length


def guessing(vocab_size: int, dice: random.Random, wrong: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """Drafts of any length of what the fake model says next, some of them wrong."""

    def guess(history: Tensor, lengths: Tensor, most: int) -> tuple[Tensor, Tensor]:
        drafts, counts = torch.zeros(len(history), most, dtype=torch.int64), torch.zeros(len(history)).long()
        for row, length in enumerate(lengths.tolist()):
            ids = history[row, :length].tolist()
            counts[row] = dice.randint(0, most)
            for place in range(int(counts[row])):
                right = next_token(ids, vocab_size)
                ids.append(dice.randrange(vocab_size) if dice.random() < wrong else right)
                drafts[row, place] = ids[-1]
        return drafts, counts

    return guess


def on_a_gpu(
    tokenizer: Tokenizer, speculator: DeviceSpeculator, *, budget: int = 1000, runner: CapturableRunner | None = None,
    **options: int,
) -> EngineShard:  # fmt: skip
    """Replayed steps, uploads through buffers."""
    inner = runner or CapturableRunner(vocab_size=tokenizer.vocab_size)
    graphed = GraphedRunner(inner, (64, 16, 4, 1), PlainGraphCapture(), {6: (4, 1), 3: (4, 2), 2: (8, 3)})
    shard = EngineShard(
        tokenizer, budget=budget, grows=True, num_blocks=NUM_BLOCKS, runner=graphed, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    graphed.capture(shard.engine.cache, 96, ProcessGroup())
    shard.engine.steps.staging = copying_staging()
    use_drafts(shard.engine, speculator)
    return shard
