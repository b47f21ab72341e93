"""A recurrent layer between its products: sequences of random rows, in any cut."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from parity.protocol import attention_metadata
from torch import Tensor

from model_server.recurrence.states import StatePool, StateShape
from model_server.recurrence.step import Net, plan_step
from model_server.runner.runner import RequestState

CPU = torch.device("cpu")
BLOCK = 16


class Weights(Protocol):
    def state_shape(self, dtype: torch.dtype) -> StateShape: ...


@dataclass
class Scene:
    """Sequences of random rows, and slots that are full of NaN before they begin."""

    net: Net
    weights: Weights
    rows: Sequence[Tensor]
    found: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.pool = StatePool({0: self.weights.state_shape(self.rows[0].dtype)}, CPU)
        # Not in the order of the rows.
        slots = random.Random(len(self.rows)).sample(range(2 * len(self.rows)), len(self.rows))
        self.requests = [RequestState(1, slot) for slot in slots]
        self.pool.reserve(2 * len(self.rows))
        self.pool.layer(0).inputs.fill_(math.nan)
        self.pool.layer(0).state.fill_(math.nan)
        self.done, self.found = [0] * len(self.rows), [[] for _ in self.rows]

    def run(self, steps: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute the next tokens of each sequence in each step; return all of each."""
        self.run_some(steps)
        return [torch.cat(parts) for parts in self.found]

    def run_some(self, steps: Sequence[Sequence[int]]) -> None:
        for counts in steps:
            taking = [i for i, count in enumerate(counts) if count]
            spans = [(self.done[i], self.done[i] + counts[i]) for i in taking]
            metadata = attention_metadata([range(1, 20)] * len(taking), spans, BLOCK)
            step = plan_step(metadata, BLOCK, self.pool, [self.requests[i] for i in taking])
            given = torch.cat([self.rows[i][start:stop] for i, (start, stop) in zip(taking, spans, strict=True)])
            found = step(self.net, given, self.pool.layer(0))
            for i, part in zip(taking, found.split([counts[i] for i in taking]), strict=True):
                self.found[i].append(part)
                self.done[i] += counts[i]

    def kept(self) -> tuple[Tensor, Tensor]:
        slots, layer = [request.slot for request in self.requests], self.pool.layer(0)
        return layer.inputs[slots], layer.state[slots]


def random_steps(chance: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    left, steps = list(lengths), []
    while any(left):
        most = chance.choice([1, 1, 3, 7, 40, 200])
        counts = [min(rest, chance.randint(0, most)) for rest in left]
        if any(counts):
            steps.append(counts)
            left = [rest - count for rest, count in zip(left, counts, strict=True)]
    return steps
