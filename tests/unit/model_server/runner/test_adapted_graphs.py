"""Decode steps with rows of adapters are replayed from graphs of their own, whatever is in the slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.engine_shard import BLOCK, CPU, slots_of
from support.graph_doubles import CapturableRunner, PlainGraphCapture
from torch import Tensor

from model_server.adapters.rows import BASE, AdapterRows, RowAdapters, row_tiles
from model_server.adapters.slot_table import SlotTable
from model_server.attention.metadata import AttentionMetadata
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.runner import ModelInputs, RunnerTraits

NEEDS_HOST = 9


@dataclass
class AdaptedRunner(CapturableRunner):
    """Adds to the scores of a row what is in the slot of its tile, as the kernels find it: by the tiles alone."""

    contents: Tensor = field(default_factory=lambda: torch.zeros(3))
    num_adapted: int = 0

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        logits = super().forward(inputs, cache)
        if inputs.adapters is not None:
            self.num_adapted += 1
            tiles = inputs.adapters.among(len(logits)).tiles
            assert tiles is not None
            rows = [(row, slot) for slot, *of_tile in tiles.tolist() if slot >= 0 for row in of_tile if row >= 0]
            assert len({row for row, _ in rows}) == len(rows)
            for row, slot in rows:
                logits[row] += self.contents[slot]
        return logits


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("model_server.runner.cuda_graphs.usable", lambda device: True)
    with torch.inference_mode():
        yield


def runner_of() -> tuple[GraphedRunner, AdaptedRunner, PlainGraphCapture, KvCache]:
    inner = AdaptedRunner()

    def copy(slot: int, number: int) -> bool:
        inner.contents[slot] = float(number)
        return number == NEEDS_HOST

    inner.traits = RunnerTraits(capturable=True, slots=SlotTable(3, copy))
    capture = PlainGraphCapture()
    runner = GraphedRunner(inner, (40, 4, 1), capture)
    cache = KvCache(inner.kv_shapes, 128, BLOCK, torch.float32, CPU)
    for rows in cache.rows:
        rows.fill_(3.0)
    runner.capture(cache, 16, ProcessGroup())
    inner.seen.clear()
    inner.num_adapted = 0
    return runner, inner, capture, cache


def step(slots: list[int]) -> ModelInputs:
    count = len(slots)
    tables = 1 + torch.arange(count, dtype=torch.int32)[:, None]
    metadata = AttentionMetadata(
        slots=torch.tensor([slots_of([1 + row])[2] for row in range(count)]),
        block_tables=tables,
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32),
        kv_lengths=torch.full((count,), 3, dtype=torch.int32),
        query_lengths_host=(1,) * count,
        kv_lengths_host=(3,) * count,
    )
    numbers = torch.tensor(slots)
    tiles = torch.from_numpy(row_tiles(np.array(slots, np.int64)))
    rows = AdapterRows(*[RowAdapters(numbers, CPU, tiles, numbers.int())] * 2)
    adapters = rows if any(s != BASE for s in slots) else None
    return ModelInputs(torch.arange(count) + 11, torch.full((count,), 2), metadata, None, adapters=adapters)


def test_two_families_of_which_the_batch_chooses_one() -> None:
    runner, inner, capture, cache = runner_of()
    slots = inner.traits.slots
    assert slots is not None
    num_captured = len(capture.graphs)
    assert runner.captured_sizes == (1, 4, 40) and num_captured == 6
    dice = np.random.default_rng(0)
    for turn in range(30):
        count = int(dice.integers(1, 41))
        of_rows = dice.integers(BASE, 3, count).tolist()
        if turn % 5 == 0:
            of_rows = [BASE] * count
        if turn % 3 == 0:  # another adapter in a slot: nothing is captured for it
            slots.acquire(10 + turn, tuple)
        inputs = step(of_rows)
        before = inner.num_adapted
        logits = runner.forward(inputs, cache).clone()
        assert inner.seen[-1] == (1 if count == 1 else 4 if count <= 4 else 40), "replayed with padding"
        assert (inner.num_adapted - before) == any(slot != BASE for slot in of_rows), (
            "the plain family without adapters"
        )
        assert torch.equal(logits, inner.forward(inputs, cache))
    assert len(capture.graphs) == num_captured


def test_steps_with_rows_that_need_the_host_are_not_replayed() -> None:
    runner, inner, _, cache = runner_of()
    slots = inner.traits.slots
    assert slots is not None
    slot, other = slots.acquire(NEEDS_HOST, tuple), slots.acquire(1, tuple)
    assert slot is not None and other is not None
    for of_rows, size in (([slot, other], 2), ([other, BASE], 4), ([BASE, BASE], 4)):
        runner.forward(step(of_rows), cache)
        assert inner.seen[-1] == size


def test_steps_with_wide_tiles_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--cuda-graphs` may name sizes with more rows than narrow tiles serve."""
    runner, inner, _, cache = runner_of()
    monkeypatch.setattr("model_server.adapters.rows.NARROW_ROWS", 30)
    for count, size in ((31, 31), (30, 40)):
        inputs = step([0, 2] + [BASE] * (count - 2))
        logits = runner.forward(inputs, cache).clone()
        assert inner.seen[-1] == size
        assert torch.equal(logits, inner.forward(inputs, cache))


def test_without_kernels_steps_with_adapters_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_server.runner.cuda_graphs.usable", lambda device: False)
    runner, inner, capture, cache = runner_of()
    assert len(capture.graphs) == 3
    runner.forward(step([0, BASE]), cache)
    assert inner.seen[-1] == 2
    without = dataclasses.replace(step([0, BASE]), adapters=None)
    runner.forward(without, cache)
    assert inner.seen[-1] == 4
