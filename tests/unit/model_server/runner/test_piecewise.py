"""Steps with prompts, replayed in pieces around their attention: the step itself, whatever the padding holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from parity.protocol import CPU, attention_metadata
from support.graph_doubles import PlainGraphCapture
from torch import Tensor

from model_server.adapters.rows import BASE, AdapterRows, RowAdapters, row_tiles
from model_server.adapters.slot_table import SlotTable
from model_server.attention.backend import AttentionLayer
from model_server.attention.reference import ReferenceBackend
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.runner import ModelInputs, RunnerTraits

BLOCK, DIM, HEADS, VOCAB = 16, 4, 2, 11
MAX_LENGTH = 200
WIDTH = 14  # blocks of a sequence
ALONE = ProcessGroup()
NEEDS_HOST = 99


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class TwoLayers:
    """Two layers of attention with something before, between and behind, a `Runner`. Their windows differ."""

    traits = RunnerTraits(attention=ReferenceBackend(), capturable=True)
    vocab_size, max_positions = VOCAB, None
    kv_shapes = (KvShape(1, DIM, DIM), KvShape(1, DIM, DIM))

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(5)
        self._embedding, self._mix, self._head = (
            torch.randn(n, m, generator=dice)
            for n, m in ((VOCAB, HEADS * DIM), (HEADS * DIM, HEADS * DIM), (HEADS * DIM, VOCAB))
        )
        self.eager: list[int] = []  # tokens of the steps that were not captured
        self.reserved = 0
        self.fails: Exception | None = None

    def set_longest(self, longest: int) -> None:
        pass

    def reserve_positions(self, max_positions: int) -> None:
        self.reserved = max_positions

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        if inputs.attention_step is None:
            self.eager.append(len(inputs.input_ids))
        elif self.fails is not None:
            raise self.fails
        attention = inputs.attention_step or self.traits.attention.start(inputs.attention, cache)  # type: ignore[union-attr]
        hidden = self._embedding[inputs.input_ids] + inputs.positions.view(-1, 1) / 100
        for index, window in enumerate((None, 7)):
            layer = AttentionLayer(
                index=index, num_heads=HEADS, num_kv_heads=1, head_dim=DIM, value_dim=DIM, scale=0.5, window=window
            )
            key, value = hidden[:, None, :DIM], hidden[:, None, DIM:]
            cache.write(index, inputs.attention.slots, key, value)
            hidden = hidden + attention.attend(layer, hidden.view(-1, HEADS, DIM), key, value) @ self._mix
            self.adapt(hidden, inputs)
        kept = hidden if inputs.logit_rows is None else hidden[inputs.logit_rows]
        self.adapt(kept, inputs)
        return kept @ self._head

    def adapt(self, hidden: Tensor, inputs: ModelInputs) -> None:
        """What adapters make of some rows; here there are none."""


class AdaptedLayers(TwoLayers):
    """Adds to the rows of a tile what is in its slot, as kernels find them: by what is on the device alone."""

    def __init__(self) -> None:
        super().__init__()
        self.contents = torch.zeros(3)
        self.traits = RunnerTraits(attention=ReferenceBackend(), capturable=True, slots=SlotTable(3, self.copy))

    def copy(self, slot: int, number: int) -> bool:
        self.contents[slot] = number / 10
        return number == NEEDS_HOST

    def adapt(self, hidden: Tensor, inputs: ModelInputs) -> None:
        if inputs.adapters is None:
            return
        own = inputs.adapters.among(len(hidden))
        tiles, slots = own.tiles, own.slots
        assert tiles is not None and slots is not None and len(slots) == len(hidden)
        rows = {row: slot for slot, *of_tile in tiles.tolist() if slot >= 0 for row in of_tile if row >= 0}
        assert rows == {row: slot for row, slot in enumerate(slots.tolist()) if slot >= 0}
        for row, slot in rows.items():
            hidden[row] += self.contents[slot]


def cache_of(runner: TwoLayers) -> KvCache:
    cache = KvCache(runner.kv_shapes, 64, BLOCK, torch.float32, CPU)
    for number, rows in enumerate(cache.rows):
        rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(number)))
    return cache


def graphed(
    sizes: tuple[int, ...] = (8, 2), **changes: object
) -> tuple[GraphedRunner, TwoLayers, KvCache, PlainGraphCapture]:
    inner, capture = TwoLayers(), PlainGraphCapture(**changes)  # type: ignore[arg-type]
    runner, cache = GraphedRunner(inner, sizes, capture), cache_of(inner)
    runner.capture(cache, MAX_LENGTH, ALONE)
    inner.eager.clear()
    return runner, inner, cache, capture


def step(batch: list[tuple[int, int]], seed: int = 0, *, scored: bool = False) -> ModelInputs:
    """(query tokens, tokens in all) of each sequence; logits of the last tokens, or of all tokens."""
    metadata = attention_metadata(
        [range(1 + i * WIDTH, 1 + (i + 1) * WIDTH) for i in range(len(batch))],
        [(total - count, total) for count, total in batch],
        BLOCK,
    )
    dice = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(total - count, total) for count, total in batch])
    rows = metadata.cu_seqlens_q[1:].long() - 1
    ids = torch.randint(0, VOCAB, (len(positions),), generator=dice)
    return ModelInputs(ids, positions, metadata, torch.arange(len(ids)) if scored else rows)


STEPS = [
    [(7, 7), (1, 30), (1, 1)],
    [(64, 64)],
    [(65, 100), (3, 9), (1, 17)],
    [(2, 2)],
    [(200, 200), (100, 100), (1, 50)],
    [(1, 5)],
]


def test_replays_are_the_steps_themselves() -> None:
    """One after the other, so that each finds in the buffers what the ones before have left."""
    runner, inner, cache, _ = graphed()
    assert runner.captured_tokens == (64, 128, 256, 512) and inner.reserved == MAX_LENGTH
    other, plain = cache_of(inner), TwoLayers()
    for seed, batch in enumerate(STEPS):
        inputs = step(batch, seed)
        logits, expected = runner.forward(inputs, cache), plain.forward(inputs, other)
        torch.testing.assert_close(logits, expected)
        for ours, theirs in zip(cache.rows, other.rows, strict=True):
            torch.testing.assert_close(ours[BLOCK:], theirs[BLOCK:], msg="padding writes the reserved block alone")
    assert inner.eager == []


@pytest.mark.parametrize("case", ["too many tokens", "too many rows", "image", "sections", "another cache"])
def test_what_runs_as_it_is(case: str) -> None:
    runner, inner, cache, _ = graphed()
    inputs = step([(9, 9)], scored=case == "too many rows")
    if case == "too many tokens":
        inputs = step([(200, 200)] * 2 + [(113, 113)])
    elif case == "image":
        inputs = replace(inputs, embeddings=((0, torch.zeros(1, HEADS * DIM)),))
    elif case == "sections":
        inputs = replace(inputs, positions=inputs.positions.view(1, -1))
    runner.forward(inputs, cache_of(inner) if case == "another cache" else cache)
    assert inner.eager == [len(inputs.input_ids)]


def test_scored_prompts_within_the_rows() -> None:
    runner, inner, cache, _ = graphed()
    inputs = step([(5, 9), (3, 3)], scored=True)
    torch.testing.assert_close(runner.forward(inputs, cache), TwoLayers().forward(inputs, cache_of(inner)))
    assert inner.eager == []


def test_a_longer_sequence_than_was_said_ends_the_graphs() -> None:
    runner, _, cache, _ = graphed()
    runner.forward(step([(3, MAX_LENGTH + 1)]), cache)
    assert runner.captured_tokens == runner.captured_sizes == ()


def test_a_size_without_memory_is_left_out() -> None:
    runner, _, _, _ = graphed(fail={0: torch.OutOfMemoryError("no")})
    assert runner.captured_tokens == (64, 128, 256) and runner.captured_sizes == (2, 8)


def test_prompts_that_cannot_be_captured_leave_decode_its_graphs(caplog: pytest.LogCaptureFixture) -> None:
    inner = TwoLayers()
    inner.fails = RuntimeError("operation not permitted\nmore")
    runner, cache = GraphedRunner(inner, (2,), PlainGraphCapture()), cache_of(inner)
    runner.capture(cache, MAX_LENGTH, ALONE)
    assert runner.captured_tokens == () and runner.captured_sizes == (2,)
    assert "Steps with prompts run without CUDA graphs: operation not permitted" in caplog.text
    runner.forward(step([(3, 3)]), cache)


def with_adapters(inputs: ModelInputs, slots: list[int]) -> ModelInputs:
    """slots: of each sequence."""
    numbers = torch.tensor(slots).repeat_interleave(torch.tensor(inputs.attention.query_lengths_host))
    assert inputs.logit_rows is not None
    all_rows, kept = (
        RowAdapters(rows, CPU, torch.from_numpy(row_tiles(rows.numpy())), rows.int())
        for rows in (numbers, numbers[inputs.logit_rows])
    )
    return replace(inputs, adapters=AdapterRows(all_rows, kept))


def test_prompts_with_adapters_have_pieces_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows of logits as places for them, too, and what an earlier step with more rows has left."""
    monkeypatch.setattr("model_server.runner.cuda_graphs.usable", lambda device: True)
    inner, plain, capture = AdaptedLayers(), AdaptedLayers(), PlainGraphCapture()
    runner, cache, other = GraphedRunner(inner, (64, 2), capture), cache_of(inner), cache_of(inner)
    runner.capture(cache, MAX_LENGTH, ALONE)
    inner.eager.clear()
    num_graphs, slots = len(capture.graphs), inner.traits.slots
    assert slots is not None and runner.captured_tokens == (64, 128, 256, 512)
    dice = torch.Generator().manual_seed(1)
    for seed, batch in enumerate(STEPS * 2):
        number = 3 + seed
        assert slots.acquire(number, tuple) == plain.traits.slots.acquire(number, tuple)  # type: ignore[union-attr]
        of_rows = torch.randint(BASE, 3, (len(batch),), generator=dice).tolist()
        inputs = step(batch, seed)
        inputs = with_adapters(inputs, of_rows) if seed % 4 else inputs
        torch.testing.assert_close(runner.forward(inputs, cache), plain.forward(inputs, other))
    assert inner.eager == [] and len(capture.graphs) == num_graphs
    needs_host = slots.acquire(NEEDS_HOST, tuple)
    assert needs_host is not None
    runner.forward(with_adapters(step([(3, 3)]), [needs_host]), cache)
    scored = with_adapters(step([(64, 64)], scored=True), [1 - needs_host])
    torch.testing.assert_close(runner.forward(scored, cache), inner.forward(scored, other))
    assert inner.eager == [3, 64, 64], "with as many rows of logits as tokens they could not be told apart"


def test_release_gives_everything_back_and_the_cost_counts_all() -> None:
    runner, inner, cache, capture = graphed(cost=10)
    assert capture.bytes_used == 10 * (4 + 2)
    runner.release()
    assert capture.bytes_used == 0 and all(graph.released for graph in capture.graphs)
    runner.forward(step([(3, 3)]), cache)
    assert inner.eager == [3]
    cost = runner.measure(cache, MAX_LENGTH, ALONE)
    assert (cost.first_bytes, cost.next_bytes) == (50, 10) and capture.bytes_used == 0
