"""Which steps are replayed, what padding does, and what becomes of sizes that cannot be captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.engine_shard import BLOCK, CPU, EngineShard, slots_of, tokens_of
from support.fake_model import FakeRunner, FakeStageRunner, FakeStateRunner
from support.graph_doubles import CapturableRunner, CapturableStageRunner, PlainGraphCapture
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_server.attention.metadata import AttentionMetadata
from model_server.distributed.group import ProcessGroup
from model_server.errors import FatalError, StartupError
from model_server.memory.kv_cache import KvCache
from model_server.runner.cuda_graphs import GraphCost, GraphedRunner
from model_server.runner.graph_choice import with_graphs
from model_server.runner.graph_sizes import DEFAULT_SIZES, graph_sizes, window_sizes
from model_server.runner.runner import ModelInputs
from model_server.text.tokenizer import Tokenizer

SIZES = (8, 4, 2, 1)
MAX_LENGTH = 32
ALONE = ProcessGroup()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a capture the garbage is collected: a second here, behind thousands of tests, and nothing to free."""
    monkeypatch.setattr("gc.collect", lambda: 0)


def cache_of(runner: CapturableRunner) -> KvCache:
    cache = KvCache(runner.kv_shapes, 128, BLOCK, torch.float32, CPU)
    for rows in cache.rows:
        rows.fill_(float("nan"))
    return cache


def decode_step(cache: KvCache, lengths: list[int], first_block: int = 1, width: int = 8) -> ModelInputs:
    """One token for each row behind `length - 1` tokens that are in the cache already."""
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    slots = []
    for row, length in enumerate(lengths):
        blocks = [first_block + row * width + i for i in range(-(-length // BLOCK))]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        places = slots_of(blocks)[:length]
        for place, slot in enumerate(places[:-1]):
            cache.rows[0][slot] = float((row * 7 + place * 3) % 50 + 1)
        slots.append(places[-1])
    kv_lengths = torch.tensor(lengths, dtype=torch.int32)
    metadata = AttentionMetadata(
        slots=torch.tensor(slots),
        block_tables=tables,
        cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32),
        kv_lengths=kv_lengths,
        query_lengths_host=(1,) * len(lengths),
        kv_lengths_host=tuple(lengths),
    )
    ids = torch.arange(len(lengths)) + 11
    return ModelInputs(ids, kv_lengths.long() - 1, metadata, None)


def graphed(sizes: tuple[int, ...] = SIZES, **changes: object) -> tuple[GraphedRunner, CapturableRunner, KvCache]:
    inner = CapturableRunner()
    runner = GraphedRunner(inner, sizes, PlainGraphCapture(**changes))  # type: ignore[arg-type]
    cache = cache_of(inner)
    runner.capture(cache, MAX_LENGTH, ALONE)
    inner.seen.clear()
    return runner, inner, cache


@pytest.mark.parametrize(
    ("asked", "largest_batch", "expected"),
    [
        ([], None, tuple(reversed(DEFAULT_SIZES))),
        ([], 6, (8, 4, 2, 1)),
        ([], 8, (8, 4, 2, 1)),
        ([], 1, (1,)),
        ([0], None, ()),
        ([0], 4, ()),
        ([4, 16, 4, 0, 1], None, (16, 4, 1)),
        ([4, 16], 100, (16, 4)),
        ([4, 16, 64], 16, (16, 4)),
    ],
)
def test_sizes(asked: list[int], largest_batch: int | None, expected: tuple[int, ...]) -> None:
    assert graph_sizes(asked, largest_batch) == expected


def test_defaults_are_dense_and_reach_far() -> None:
    assert DEFAULT_SIZES[:5] == (1, 2, 4, 8, 16) and DEFAULT_SIZES[-1] == 256 and len(DEFAULT_SIZES) == 35


def test_an_absurd_size_is_refused() -> None:
    with pytest.raises(StartupError, match="--cuda-graphs 5000"):
        graph_sizes([5000], None)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8])
def test_a_replay_is_the_step_itself(rows: int) -> None:
    runner, inner, cache = graphed()
    lengths = [1 + (5 * i) % MAX_LENGTH for i in range(rows)]
    inputs = decode_step(cache, lengths)
    expected = CapturableRunner().forward(inputs, cache)
    written = cache.rows[0].clone()
    cache.rows[0][inputs.attention.slots] = float("nan")
    logits = runner.forward(inputs, cache)
    assert torch.equal(logits, expected)
    assert inner.seen == [min(size for size in SIZES if size >= rows)], "the smallest size that holds the rows"
    assert torch.equal(cache.rows[0][BLOCK:].nan_to_num(-1), written[BLOCK:].nan_to_num(-1))


class WritingRunner(CapturableRunner):
    """Writes its logits where they are wanted."""

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        logits = super().forward(inputs, cache)
        return logits if inputs.output is None else torch.add(logits, 0, out=inputs.output)


class CopiesTo(TorchDispatchMode):
    """Counts copies to one address."""

    def __init__(self, address: int) -> None:
        super().__init__()
        self._address, self.number = address, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.copy_.default and args[0].data_ptr() == self._address
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "copies"), [(CapturableRunner, 1), (WritingRunner, 0)])
def test_logits_are_copied_only_from_where_the_runner_wrote_them(kind: type[CapturableRunner], copies: int) -> None:
    inner = kind()
    runner = GraphedRunner(inner, SIZES, PlainGraphCapture())
    cache = cache_of(inner)
    runner.capture(cache, MAX_LENGTH, ALONE)
    step = decode_step(cache, [5, 9, 2])
    expected = CapturableRunner().forward(step, cache)
    with CopiesTo(runner.forward(step, cache).data_ptr()) as counted:
        logits = runner.forward(step, cache)
    assert torch.equal(logits, expected)
    assert counted.number == copies


def test_padding_writes_nothing_but_the_reserved_block() -> None:
    runner, _, cache = graphed()
    runner.forward(decode_step(cache, [30] * 8), cache)
    for rows in cache.rows:
        rows.fill_(-1.0)
    inputs = decode_step(cache, [9, 2, 17], first_block=40)
    before = cache.rows[0].clone()
    runner.forward(inputs, cache)
    changed = (before != cache.rows[0]).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) == {0, *inputs.attention.slots.tolist()}


def test_rows_that_left_are_padding_and_what_changed_is_honoured() -> None:
    runner, _, cache = graphed()
    dice = torch.Generator().manual_seed(3)
    for _ in range(40):
        rows = int(torch.randint(1, 9, (1,), generator=dice))
        width = int(torch.randint(8, 12, (1,), generator=dice))  # beyond 8 wider than the buffers
        cache.rows[0].fill_(float("nan"))
        lengths = torch.randint(1, MAX_LENGTH + 1, (rows,), generator=dice).tolist()
        first = int(torch.randint(1, 128 - rows * width, (1,), generator=dice))
        step = decode_step(cache, lengths, first, width)
        expected = CapturableRunner().forward(step, cache)
        assert torch.equal(runner.forward(step, cache), expected)


def test_larger_batches_and_prompts_run_as_they_are() -> None:
    runner, inner, cache = graphed((2, 1))
    step = decode_step(cache, [5, 6, 7])
    assert torch.equal(runner.forward(step, cache), CapturableRunner().forward(step, cache))
    assert inner.seen == [3]
    prompt = ModelInputs(
        torch.tensor([4, 5, 6]),
        torch.arange(3),
        AttentionMetadata(
            slots=torch.arange(3) + BLOCK,
            block_tables=torch.ones(1, 1, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
            kv_lengths=torch.tensor([3], dtype=torch.int32),
            query_lengths_host=(3,),
            kv_lengths_host=(3,),
        ),
        torch.tensor([2]),
    )
    assert runner.forward(prompt, cache).shape == (1, 64)


def test_another_cache_is_never_written_by_a_replay() -> None:
    runner, inner, _ = graphed()
    other = cache_of(inner)
    step = decode_step(other, [5, 6, 7])
    runner.forward(step, other)
    assert inner.seen == [3], "run as it is"


def test_a_longer_sequence_than_was_said_ends_the_graphs() -> None:
    runner, inner, cache = graphed()
    step = decode_step(cache, [MAX_LENGTH + 1], width=9)
    assert torch.equal(runner.forward(step, cache), CapturableRunner().forward(step, cache))
    assert runner.captured_sizes == () and inner.seen == [1]


def test_positions_are_reserved_before_anything_is_recorded() -> None:
    _, inner, _ = graphed()
    assert inner.reserved == MAX_LENGTH


def test_a_size_without_memory_is_left_out() -> None:
    runner, inner, cache = graphed(fail={0: torch.OutOfMemoryError("no")})
    assert runner.captured_sizes == (1, 2, 4)
    runner.forward(decode_step(cache, [3] * 3), cache)
    runner.forward(decode_step(cache, [3] * 5), cache)
    assert inner.seen == [4, 5]


def test_a_size_that_runs_out_of_memory_outside_of_the_capture() -> None:
    inner = CapturableRunner(lose_memory_at={8})
    runner = GraphedRunner(inner, SIZES, PlainGraphCapture())
    runner.capture(cache_of(inner), MAX_LENGTH, ALONE)
    assert runner.captured_sizes == (1, 2, 4)


class TwoRanks(ProcessGroup):
    """Another rank that says the same, but for one answer."""

    size = 2

    def __init__(self, answers: dict[int, int]) -> None:
        self.answers = answers
        self.asked = 0

    def all_reduce_min(self, value: int) -> int:
        self.asked += 1
        return min(value, self.answers.get(self.asked, value))


def test_what_one_rank_lacks_memory_for_no_rank_captures() -> None:
    inner = CapturableRunner()
    capture = PlainGraphCapture()
    runner = GraphedRunner(inner, SIZES, capture)
    runner.capture(cache_of(inner), MAX_LENGTH, TwoRanks({3: 1}))  # 1: buffers; 2: 8 rows; 3: 4 rows
    assert runner.captured_sizes == (1, 2, 8)
    assert [r.released for r in capture.graphs] == [False, True, False, False]


def test_a_rank_that_fails_in_a_step_leaves_the_others_inside_a_collective() -> None:
    inner = CapturableRunner(lose_memory_at={8})
    with pytest.raises(FatalError, match="out of memory"):
        GraphedRunner(inner, SIZES, PlainGraphCapture()).capture(cache_of(inner), MAX_LENGTH, TwoRanks({}))


def test_work_that_cannot_be_captured_turns_graphs_off(caplog: pytest.LogCaptureFixture) -> None:
    runner, inner, cache = graphed(fail={1: RuntimeError("operation not permitted\nmore")})
    assert runner.captured_sizes == ()
    assert "without CUDA graphs: operation not permitted" in caplog.text
    runner.forward(decode_step(cache, [3] * 3), cache)
    assert inner.seen == [3]


def test_memory_of_the_driver_may_be_short_for_one_size() -> None:
    runner, _, _ = graphed(fail={1: RuntimeError("CUDA error: out of memory\nmore")})
    assert set(runner.captured_sizes) == set(SIZES) - {4}


def test_buffers_without_memory_turn_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("model_server.runner.cuda_graphs.DecodeBuffers", no_memory)
    runner, _, _ = graphed()
    assert runner.captured_sizes == ()


def test_a_second_capture_releases_the_first() -> None:
    runner, inner, _ = graphed()
    other = cache_of(inner)
    runner.capture(other, MAX_LENGTH, ALONE)
    inner.seen.clear()
    runner.forward(decode_step(other, [5, 6, 7]), other)
    assert inner.seen == [4]
    runner.release()
    runner.release()
    assert runner.captured_sizes == ()


def test_the_cost_of_graphs_is_measured_and_given_back() -> None:
    inner, capture = CapturableRunner(), PlainGraphCapture(cost=100)
    runner = GraphedRunner(inner, SIZES, capture)
    cost = runner.measure(cache_of(inner), MAX_LENGTH, ALONE)
    assert cost == GraphCost(100, 100) and capture.bytes_used == 0 and runner.captured_sizes == ()
    assert cost.total(4) == 400 and cost.total(0) == 0
    assert GraphCost(1000, 10).total(1) == 1000


@pytest.mark.parametrize("sizes", [(), SIZES])
def test_who_gets_graphs(sizes: tuple[int, ...]) -> None:
    able, unable, states = CapturableRunner(), FakeRunner(), FakeStateRunner()
    assert isinstance(with_graphs(able, sizes, PlainGraphCapture()), GraphedRunner) == bool(sizes)
    assert with_graphs(unable, sizes, PlainGraphCapture()) is unable
    assert with_graphs(states, sizes, PlainGraphCapture(), {4: (2,)}) is states, "nor does any window get one"


def test_a_runner_with_graphs_looks_like_the_one_inside() -> None:
    runner, inner, _ = graphed()
    assert runner.traits is inner.traits
    assert (runner.vocab_size, runner.max_positions, runner.kv_shapes) == (
        inner.vocab_size,
        inner.max_positions,
        inner.kv_shapes,
    )


def middle_stage() -> tuple[GraphedRunner, CapturableStageRunner, KvCache]:
    """Of three: it gets the ids as a residual stream and passes them on."""
    inner = CapturableStageRunner(is_first=False, is_last=False)
    runner = GraphedRunner(inner, (4, 2), PlainGraphCapture())
    return runner, inner, cache_of(inner)


def test_a_stage_replays_from_the_stream_of_the_stage_before() -> None:
    runner, inner, cache = middle_stage()
    runner.capture(cache, MAX_LENGTH, ALONE)
    assert runner.captured_sizes == (2, 4) and runner.captured_tokens == ()
    inner.seen.clear()
    inputs = decode_step(cache, [9, 2, 17])
    passed_on = []
    for first in (20.0, 30.0):
        ids = torch.arange(3)[:, None] + torch.full((3, 4), first)
        passed_on.append(runner.forward(dataclasses.replace(inputs, hidden=ids.clone()), cache))
        assert torch.equal(passed_on[-1], ids)
    assert inner.seen == [4, 4]
    assert passed_on[0][0, 0] == 20, "the first may still be on its way when the second is computed"


def test_padding_of_a_stage_begins_at_zero_each_time() -> None:
    """The double writes into what it gets."""
    runner, inner, cache = middle_stage()
    runner.capture(cache, MAX_LENGTH, ALONE)
    got = []
    forward = inner.forward

    def noting(inputs: ModelInputs, cache: KvCache) -> torch.Tensor:
        assert inputs.hidden is not None
        got.append(inputs.hidden[:, 0].tolist())
        return forward(inputs, cache)

    inner.forward = noting  # type: ignore[method-assign]
    for _ in range(2):
        runner.forward(dataclasses.replace(decode_step(cache, [5, 5, 5]), hidden=torch.full((3, 4), 8.0)), cache)
    assert got == [[8.0, 8.0, 8.0, 0.0]] * 2


def test_no_stage_has_graphs_if_one_cannot() -> None:
    """All of them decide together, since each has other layers."""
    runner, _, cache = middle_stage()

    class OtherStageCannot(ProcessGroup):
        def all_reduce_min(self, value: int) -> int:
            return 0

    unable = FakeStageRunner(is_first=False)
    assert isinstance(with_graphs(unable, SIZES, PlainGraphCapture()), GraphedRunner)
    runner.capture(cache, MAX_LENGTH, OtherStageCannot())
    assert runner.captured_sizes == ()
    assert runner.measure(cache, MAX_LENGTH, OtherStageCannot()) == GraphCost(0, 0)


def test_an_engine_says_the_same_with_graphs(tiny_tokenizer: Tokenizer) -> None:
    inner = CapturableRunner(vocab_size=tiny_tokenizer.vocab_size)
    runner = GraphedRunner(inner, (4, 2, 1), PlainGraphCapture())
    shard = EngineShard(tiny_tokenizer, runner=runner)  # type: ignore[arg-type]
    runner.capture(shard.engine.cache, MAX_LENGTH, ALONE)
    inner.seen.clear()
    requests = [shard.request([5 + i, 6, 7], 4 + i) for i in range(3)]
    results = shard.run_out(shard.prefill(0, *requests), 0)
    assert tokens_of(*results) == {r.id: shard.expected(r) for r in requests}
    assert inner.seen == [3, 4, 4, 4, 2, 1], "the prompts, then replays"


def test_windows_replay_graphs_of_their_own() -> None:
    """By places and sequences; where there is none, the graph of as many single queries."""
    inner = CapturableRunner()
    runner = GraphedRunner(inner, (16, 4, 1), PlainGraphCapture(), {4: (4, 2), 3: (4, 2), 2: (3, 1)})
    cache = cache_of(inner)
    runner.capture(cache, MAX_LENGTH, ProcessGroup())
    assert runner.captured_sizes == (1, 4, 16)
    assert {places: runner._captured(places) for places in (4, 3, 2)} == {4: (2, 4), 3: (2, 4), 2: (1, 3)}
    assert runner.num_graphs == 9
    for sequences, places, rows in ((1, 4, 8), (3, 4, 16), (5, 2, 16), (2, 2, 6), (1, 2, 2), (4, 3, 12), (1, 1, 1)):
        inner.seen.clear()
        inputs = decode_step(cache, [3] * (sequences * places))
        attention = dataclasses.replace(inputs.attention, places=places)
        runner.forward(dataclasses.replace(inputs, attention=attention), cache)
        assert inner.seen == [rows], (sequences, places)


def test_windows_without_memory_are_left_out_at_once(caplog: pytest.LogCaptureFixture) -> None:
    inner = CapturableRunner()
    capture = PlainGraphCapture(fail={2: torch.OutOfMemoryError("no memory")})
    runner = GraphedRunner(inner, (16, 4), capture, {4: (4, 2), 2: (3, 1)})
    runner.capture(cache_of(inner), MAX_LENGTH, ProcessGroup())
    assert {places: runner._captured(places) for places in (4, 2)} == {4: (), 2: (1, 3)}
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "No memory for a CUDA graph of 4 rows with drafts of 3 tokens, and of fewer rows: it is left out"
    ]


def test_sizes_of_windows() -> None:
    assert window_sizes(0, 128, None) == {}
    found = window_sizes(5, 128, None)
    assert {places: (sizes[0], sizes[-1]) for places, sizes in found.items()} == {6: (24, 1), 4: (32, 1), 2: (64, 1)}
    assert window_sizes(3, 128, 2) == {4: (2, 1), 2: (2, 1)}
    assert window_sizes(15, 8, None).keys() == {4, 2}
