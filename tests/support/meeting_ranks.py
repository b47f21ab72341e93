"""Ranks as threads of one process: their collectives meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from support.thread_ranks import LIMIT_S
from torch import Tensor

from model_server.distributed.group import ProcessGroup

T = TypeVar("T")


class MeetingRank(ProcessGroup):
    def __init__(self, rank: int, size: int, barrier: threading.Barrier, given: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._given = barrier, given

    def _exchange(self, value: Any) -> list[Any]:
        self._given[self.rank] = value
        self._barrier.wait(LIMIT_S)
        found = list(self._given)
        self._barrier.wait(LIMIT_S)
        return found

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor.clone())).sum(dim=0)

    def all_gather_last(self, tensor: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        found = torch.cat(self._exchange(tensor.clone()), dim=-1)
        if out is not None:
            return out.copy_(found)
        return found if dtype is None else found.to(dtype)

    def all_reduce_min(self, value: int) -> int:
        return min(self._exchange(value))


def on_ranks(size: int, work: Callable[[ProcessGroup], T]) -> list[T]:
    """What each rank makes of `work`."""
    barrier, given = threading.Barrier(size), [None] * size

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(MeetingRank(rank, size, barrier, given))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return [job.result() for job in [threads.submit(run, rank) for rank in range(size)]]
