"""Uploads through buffers that are used again."""

from __future__ import annotations

import numpy as np
import torch
from support.graph_doubles import FakeEvent, copying_staging

from model_server.memory.transfer import NUM_BUFFERS, Staging


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
    sent = [arrays(seed) for seed in range(3 * NUM_BUFFERS)]
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


def test_a_buffer_is_not_written_before_the_copy_that_reads_it_is_over() -> None:
    events: list[FakeEvent] = []
    order: list[str] = []

    class Event(FakeEvent):
        def record(self) -> None:
            super().record()
            order.append(f"copied {events.index(self)}")

        def synchronize(self) -> None:
            super().synchronize()
            order.append(f"waited {events.index(self)}")

    def new_event() -> Event:
        events.append(Event())
        return events[-1]  # type: ignore[return-value]

    allocated: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        allocated.append(size)
        return torch.empty(size, dtype=torch.uint8)

    staging = Staging(torch.device("cpu"), allocate=allocate, new_event=new_event)
    for _ in range(2 * NUM_BUFFERS):
        staging.upload(np.arange(3))
    first = [f"copied {i}" for i in range(NUM_BUFFERS)]
    assert order == first + [f"{what} {i}" for i in range(NUM_BUFFERS) for what in ("waited", "copied")]
    assert len(allocated) == NUM_BUFFERS, "buffers are made once"
    staging.upload(np.zeros(1 << 20, np.uint8))
    assert len(allocated) == NUM_BUFFERS + 1 and allocated[-1] == 1 << 20


def test_a_cpu_shares_memory() -> None:
    array = np.arange(5)
    [tensor] = Staging(torch.device("cpu")).upload(array)
    array += 1
    assert tensor.tolist() == [1, 2, 3, 4, 5]


def test_nothing_to_copy() -> None:
    [tensor] = copying_staging().upload(np.zeros((0, 3), np.int32))
    assert tensor.shape == (0, 3) and tensor.dtype == torch.int32
