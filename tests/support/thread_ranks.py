"""Tensor-parallel ranks as threads of one process, for tests of what each of them loads and computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from model_server.distributed.group import ProcessGroup

_T = TypeVar("_T")
LIMIT_S = 240
"""For ranks that never meet; one that fails breaks the barrier at once. Less than the limit of a test, after which its
threads would be waited for without end."""


class ThreadGroup(ProcessGroup):
    """One of several threads whose collectives meet at a barrier."""

    def __init__(self, rank: int, size: int, shared: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._shared, self._barrier = shared, barrier

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._all(tensor)).sum(0)

    def all_gather_last(self, tensor: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        found = torch.cat(self._all(tensor if dtype is None else tensor.to(dtype)), -1)
        return found if out is None else out.copy_(found)

    def all_reduce_min(self, value: int) -> int:
        return min(int(one) for one in self._all(torch.tensor(value)))

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._shared[self.rank] = tensor.clone()
        self._barrier.wait(LIMIT_S)
        found = [one for one in self._shared if one is not None]
        self._barrier.wait(LIMIT_S)
        return found


def on_ranks(size: int, work: Callable[[ProcessGroup], _T]) -> list[_T]:
    """What `work` returns on each of `size` ranks."""
    shared: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> _T:
        try:
            return work(ThreadGroup(rank, size, shared, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
