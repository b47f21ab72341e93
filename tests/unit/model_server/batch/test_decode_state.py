"""What a decoding batch keeps from step to step, and what a step costs of copies from the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.engine_shard import BLOCK, CPU, EngineShard, tokens_of
from support.graph_doubles import CapturableRunner, FakeEvent

from model_server.batch.growth import BlockGrowth
from model_server.batch.results import StepResult
from model_server.engine.steps.running import Running
from model_server.memory.transfer import Staging
from model_server.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class CountingStaging(Staging):
    """Uploads as to a GPU, and counts them."""

    def __init__(self) -> None:
        super().__init__(CPU, allocate=lambda size: torch.empty(size, dtype=torch.uint8), new_event=FakeEvent)
        self.count = 0

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        self.count += 1
        return super().upload(*arrays)


def shard_with(tokenizer: Tokenizer, *, grows: bool = False) -> tuple[EngineShard, CountingStaging]:
    runner = CapturableRunner(vocab_size=tokenizer.vocab_size)
    shard = EngineShard(tokenizer, budget=1000, grows=grows, runner=runner)
    staging = shard.engine.steps.staging = CountingStaging()
    return shard, staging


def running_of(shard: EngineShard) -> Running:
    running = shard.engine._store.find(0)
    assert running is not None
    return running


def test_a_step_of_the_same_rows_copies_nothing_from_the_host(tiny_tokenizer: Tokenizer) -> None:
    shard, staging = shard_with(tiny_tokenizer)
    requests = [shard.request([5 + i, 6, 7], 3 * BLOCK) for i in range(3)]
    results = [shard.prefill(0, *requests), shard.decode(0)]
    staging.count = 0
    results += [shard.decode(0) for _ in range(2 * BLOCK)]
    assert staging.count == 0, "across block borders too"
    assert running_of(shard).decode.has_run
    for request in requests:
        assert tokens_of(*results)[request.id] == shard.expected(request)[: len(results)]


def test_blocks_come_in_one_upload(tiny_tokenizer: Tokenizer) -> None:
    shard, staging = shard_with(tiny_tokenizer, grows=True)
    requests = [shard.request([5 + i, 6, 7], 60, tokens=BLOCK) for i in range(3)]
    results = [shard.prefill(0, *requests), shard.decode(0)]
    counts = []
    for _ in range(40):
        rows = running_of(shard).batch.sequences
        growth = [BlockGrowth(s.id, np.array(shard.blocks(BLOCK), np.int64)) for s in rows if not s.has_slots]
        staging.count = 0
        results.append(shard.decode(0, new_blocks=growth))
        counts.append((bool(growth), staging.count))
    assert set(counts) == {(True, 1), (False, 0)}
    for request in requests:
        assert tokens_of(*results)[request.id] == shard.expected(request)[: len(results)]


def test_rows_that_leave_and_rows_that_join(tiny_tokenizer: Tokenizer) -> None:
    shard, staging = shard_with(tiny_tokenizer)
    first = [shard.request([5 + i, 6, 7], 20) for i in range(4)]
    results: list[StepResult] = [shard.prefill(0, *first), shard.decode(0)]
    shard.engine.filter(0, [first[1].id, first[3].id])
    staging.count = 0
    results.append(shard.decode(0))
    assert staging.count == 2, "what is kept and where it stands, and ids"
    late = shard.request([9, 8], 20)
    results += [shard.prefill(1, late), shard.decode(0, 1)]
    staging.count = 0
    results += [shard.decode(0) for _ in range(3)]
    assert staging.count == 0
    said = tokens_of(*results)
    for request in (first[1], first[3], late):
        assert said[request.id] == shard.expected(request)[: len(said[request.id])]
    assert len(said[late.id]) == 5


def test_a_step_is_submitted_on_ids_that_the_host_has_not_seen(tiny_tokenizer: Tokenizer) -> None:
    """Three steps deep, and with a row that ends in between."""
    shard, staging = shard_with(tiny_tokenizer)
    short, long = shard.request([5, 6, 7], 3), shard.request([8, 9], 12)
    results = [shard.prefill(0, short, long)]
    pending = [shard.submit_decode(0) for _ in range(2)]
    staging.count = 0
    pending.append(shard.submit_decode(0))  # the first has no token left
    newest = running_of(shard).in_flight
    assert newest is not None and len(newest.rows) == 1
    results += [collect() for collect in pending]
    results += shard.run_out(shard.decode(0), 0)
    assert tokens_of(*results) == {r.id: shard.expected(r) for r in (short, long)}


def test_tables_of_an_ended_row_are_not_read_by_another(tiny_tokenizer: Tokenizer) -> None:
    shard, _ = shard_with(tiny_tokenizer)
    long, short = shard.request([5, 6, 7], 40), shard.request([9], 40)
    shard.prefill(0, long, short)
    shard.decode(0)
    late = shard.request([3], 2)
    shard.engine.filter(0, [short.id])
    shard.prefill(1, late)
    shard.decode(0, 1)
    tables = shard.runner.last_inputs.attention.block_tables  # type: ignore[union-attr]
    assert tables.shape[0] == 2
    assert (tables[1] > 0).sum() == len(late.blocks), "nothing is left of who stood there"
