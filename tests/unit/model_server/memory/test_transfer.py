"""Uploads through buffers that are used again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.graph_doubles import FakeEvent, copying_staging

from model_server.memory.transfer import MOST_BUFFERS, Staging


def arrays(seed: int) -> list[np.ndarray]:
    dice = np.random.default_rng(seed)
    return [
        dice.integers(0, 9, 3),
        dice.integers(0, 9, (2, 5)).astype(np.int32),
        np.zeros(0, np.int64),
        dice.random((4, 1)),
        dice.integers(0, 9, (6, 4)).astype(np.int32)[:, ::2],
    ]


def test_values_shapes_and_types_arrive_and_stay() -> None:
    staging = copying_staging()
    sent = [arrays(seed) for seed in range(12)]
    got = [staging.upload(*parts) for parts in sent]
    for parts, tensors in zip(sent, got, strict=True):
        for array, tensor in zip(parts, tensors, strict=True):
            assert tensor.shape == array.shape and tensor.dtype == torch.from_numpy(array.copy()).dtype
            assert np.array_equal(tensor.numpy(), array)


def test_what_is_uploaded_does_not_follow_its_array() -> None:
    array = np.arange(5)
    [tensor] = copying_staging().upload(array)
    array += 1
    assert tensor.tolist() == [0, 1, 2, 3, 4]


class Copies:
    """Of a device that lags behind: a copy is over when `under_way` younger ones were begun, or somebody waits."""

    def __init__(self, under_way: int) -> None:
        self.under_way = under_way
        self.begun = 0
        self.allocated: list[int] = []
        self.waited = 0
        self.staging = Staging(torch.device("cpu"), allocate=self._allocate, new_event=lambda: _End(self))

    def _allocate(self, size: int) -> torch.Tensor:
        self.allocated.append(size)
        return torch.empty(size, dtype=torch.uint8)


class _End(FakeEvent):
    def __init__(self, copies: Copies) -> None:
        self.copies, self.number, self.is_over = copies, 0, True

    def record(self) -> None:
        assert self.is_over or self.query(), "the buffer was written while a copy read it"
        self.copies.begun += 1
        self.number, self.is_over = self.copies.begun, False

    def query(self) -> bool:
        return self.is_over or self.copies.begun - self.number >= self.copies.under_way

    def synchronize(self) -> None:
        self.copies.waited += not self.query()
        self.is_over = True


@pytest.mark.parametrize("under_way", [0, 3, 11])
def test_there_are_as_many_buffers_as_copies_under_way(under_way: int) -> None:
    copies = Copies(under_way)
    for _ in range(50):
        copies.staging.upload(np.arange(3))
    assert len(copies.allocated) == under_way + 1 and not copies.waited
    copies.staging.upload(np.zeros(1 << 20, np.uint8))
    assert len(copies.allocated) == under_way + 2 and copies.allocated[-1] == 1 << 20


def test_beyond_many_the_host_waits_for_the_oldest_copy() -> None:
    copies = Copies(10**6)
    for _ in range(MOST_BUFFERS + 5):
        copies.staging.upload(np.arange(3))
    assert len(copies.allocated) == MOST_BUFFERS and copies.waited == 5


def test_a_cpu_shares_memory() -> None:
    array = np.arange(5)
    [tensor] = Staging(torch.device("cpu")).upload(array)
    array += 1
    assert tensor.tolist() == [1, 2, 3, 4, 5]


def test_nothing_to_copy() -> None:
    [tensor] = copying_staging().upload(np.zeros((0, 3), np.int32))
    assert tensor.shape == (0, 3) and tensor.dtype == torch.int32
