"""Token embedding and output head, sharded over the vocabulary (model_server.md 4)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.distributed import ProcessGroup
from model_server.layers.linear import Linear


def vocab_range(vocab_size: int, group: ProcessGroup) -> tuple[int, int]:
    """The ids whose embeddings this rank holds: a block of ceil(V / size), the last ranks possibly less."""
    block = math.ceil(vocab_size / group.size)
    start = min(vocab_size, group.rank * block)
    return start, min(vocab_size, start + block)


class Embedding:
    """Rows of the table for token ids; [n] int64 -> [n, hidden].

    weight: this rank's rows `[start, stop)`. With several ranks, ids outside read a row of zeros and the ranks sum.
    """

    __slots__ = ("_group", "_start", "_weight", "_zero_row")

    def __init__(self, weight: Tensor, start: int, group: ProcessGroup) -> None:
        self._start = start
        self._group = group
        self._zero_row = weight.shape[0]
        self._weight = weight if group.size == 1 else torch.cat((weight, weight.new_zeros(1, weight.shape[1])))

    def __call__(self, ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(ids, self._weight)
        local = ids - self._start
        local.masked_fill_((local < 0) | (local >= self._zero_row), self._zero_row)
        return self._group.all_reduce(F.embedding(local, self._weight))


class Head:
    """Logits [n, vocab] float32 of hidden states [n, hidden], the same on every rank.

    sharded: the linear holds V / size rows and the parts are gathered; else every rank holds the whole head.
    """

    __slots__ = ("_group", "_linear", "_sharded")

    def __init__(self, linear: Linear, group: ProcessGroup, *, sharded: bool) -> None:
        self._linear = linear
        self._group = group
        self._sharded = sharded

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._linear(hidden)
        if self._sharded:
            logits = self._group.all_gather_last(logits)
        return logits.float()
