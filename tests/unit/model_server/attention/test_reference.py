"""The reference backend against attention written out in float64, one query at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from parity.protocol import CPU
from support.attention_scene import BATCHES, HEADS, Scene, naive

from model_server.attention import reference
from model_server.attention.backend import Alibi, DistanceBias
from model_server.attention.reference import ReferenceBackend
from model_server.memory.kv_cache import KvCache, KvShape


@pytest.mark.thinned(3)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 8])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_definition(
    batch: list[tuple[int, int]], heads: tuple[int, int], window: int | None, block_size: int
) -> None:
    scene = Scene(batch, *heads, block_size)
    layer = scene.layer(window)
    torch.testing.assert_close(scene.attend(layer).double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("past_windows", [False, True])
@pytest.mark.parametrize("window", [None, 2, 4])
def test_prompts_whose_tokens_see_ahead(
    window: int | None, past_windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside causal rows, on a prefix, with and without a window that some of them do not have."""
    monkeypatch.setattr(reference, "PREFILL_CHUNK_TOKENS", 3)
    scene = Scene([(7, 7), (5, 12), (1, 9), (4, 4)], 4, 2, 4)
    scene.see_ahead((0, 2, 5), (0, 5, 7), (1, 5, 10), whole=(3,), past_windows=past_windows)
    layer = scene.layer(window)
    torch.testing.assert_close(scene.attend(layer).double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


def test_small_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds on gathered keys and on prefill pieces cut the work, not the result."""
    monkeypatch.setattr(reference, "DECODE_CHUNK_BYTES", 40 * 64 * 4)
    monkeypatch.setattr(reference, "PREFILL_CHUNK_TOKENS", 3)
    for window in (None, 8):
        for batch in ([(1, n) for n in (3, 39, 40, 41, 2, 100)], [(11, 11), (10, 25), (1, 50)]):
            scene = Scene(batch, 4, 2, 4)
            layer = scene.layer(window)
            torch.testing.assert_close(scene.attend(layer).double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


def test_very_ragged_decode_is_sorted_and_put_back() -> None:
    """Enough waste that rows are sorted by length: each answer must still stand in its own row."""
    scene = Scene([(1, n) for n in (700, 3, 650, 5, 4, 2, 690)], 4, 2, 16)
    layer = scene.layer()
    torch.testing.assert_close(scene.attend(layer).double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


def test_bfloat16_cache() -> None:
    scene = Scene(BATCHES["everything mixed"], 4, 2, 4, torch.bfloat16)
    layer = scene.layer(8)
    result = scene.attend(layer)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), scene.expected(layer), rtol=2e-2, atol=2e-2)


def test_layers_with_different_windows_share_a_step() -> None:
    scene = Scene(BATCHES["everything mixed"], 4, 2, 4)
    step = ReferenceBackend().start(scene.metadata, scene.cache)
    for window in (None, 8, None):
        layer = scene.layer(window)
        result = step.attend(layer, scene.query, scene.new_key, scene.new_value)
        torch.testing.assert_close(result.double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


def test_a_poisoned_sequence_stays_alone() -> None:
    """NaN in one request's keys must not reach its neighbours."""
    scene = Scene(BATCHES["decode, ragged"], 4, 2, 4)
    layer = scene.layer()
    clean = scene.attend(layer)
    victim = 3
    table = scene.metadata.block_tables[victim, :10].long()
    scene.cache.keys[0][table] = math.nan
    poisoned = scene.attend(layer)
    others = [i for i in range(len(scene.batch)) if i != victim]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[victim].isnan().all()


# Slopes that bfloat16 cannot hold.
SLOPES = torch.tensor([0.7, 0.31, 0.011, 0.17])
BIASES = torch.linspace(-1, 2, 4 * 7).view(4, 7)  # the last is of all keys at 6 and farther
SCORES: dict[str, dict[str, Any]] = {
    "chunk of 1": {"chunk": 1},
    "chunk": {"chunk": 8},
    "softcap": {"softcap": 1.5},
    "softcap, window": {"softcap": 1.5, "window": 8},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "sinks, window": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window": 8},
    "alibi": {"alibi": Alibi(SLOPES)},
    "alibi, window": {"alibi": Alibi(SLOPES), "window": 8},
    "alibi, rounded": {"alibi": Alibi(SLOPES, 0.25)},
    "by distance": {"distance_bias": DistanceBias(BIASES)},
    "by distance, window": {"distance_bias": DistanceBias(BIASES), "window": 8},
    "everything": {"alibi": Alibi(SLOPES), "window": 8, "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("options", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_scores_of_all_kinds(batch: list[tuple[int, int]], heads: tuple[int, int], options: dict[str, Any]) -> None:
    scene = Scene(batch, *heads, 4, value_dim=8)
    layer = scene.layer(**options)
    torch.testing.assert_close(scene.attend(layer).double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", SCORES.values(), ids=SCORES)
def test_scores_of_all_kinds_in_small_pieces(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "DECODE_CHUNK_BYTES", 40 * 64 * 4)
    monkeypatch.setattr(reference, "PREFILL_CHUNK_TOKENS", 3)
    for batch in ([(1, n) for n in (3, 39, 40, 41, 2, 100)], [(11, 11), (10, 25), (1, 50)]):
        scene = Scene(batch, 4, 2, 4)
        layer = scene.layer(**options)
        torch.testing.assert_close(scene.attend(layer).double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"window": 8}, *SCORES.values()], ids=["all", "window", *SCORES])
def test_lengths_of_which_the_host_knows_bounds(options: dict[str, Any]) -> None:
    """As of windows of drafts on a GPU."""
    for lengths in ((9,), (7, 7, 7), (1, 16, 8, 5), (8,)):
        scene = Scene([(1, n) for n in lengths], 4, 2, 4)
        layer = scene.layer(**options)
        for more in ((3,), (0, 1, 4)):
            bounds = tuple(n + more[row % len(more)] for row, n in enumerate(lengths))
            metadata = dataclasses.replace(scene.metadata, kv_lengths_host=bounds)
            step = ReferenceBackend(exact=False).start(metadata, scene.cache)
            result = step.attend(layer, scene.query, scene.new_key, scene.new_value)
            torch.testing.assert_close(result.double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["softcap, window", "sinks", "alibi"])
def test_scores_in_bfloat16(name: str) -> None:
    scene = Scene(BATCHES["everything mixed"], 4, 2, 4, torch.bfloat16)
    layer = scene.layer(**SCORES[name])
    result = scene.attend(layer)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), scene.expected(layer), rtol=2e-2, atol=2e-2)


def test_layers_of_all_kinds_share_a_step() -> None:
    """What one layer plans must not be taken for what another needs."""
    scene = Scene(BATCHES["everything mixed"], 4, 2, 4)
    step = ReferenceBackend().start(scene.metadata, scene.cache)
    kinds = [*SCORES.values(), {}, {"alibi": Alibi(2 * SLOPES)}, *SCORES.values()]
    for options in kinds:
        layer = scene.layer(**options)
        result = step.attend(layer, scene.query, scene.new_key, scene.new_value)
        torch.testing.assert_close(result.double(), scene.expected(layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"window": 8}, {"chunk": 8}], ids=["window", "chunk"])
def test_keys_out_of_reach_are_not_read(options: dict[str, Any]) -> None:
    """Blocks that lie wholly before a window or a chunk may have been given to somebody else."""
    for batch in ([(1, 64)], [(1, 64), (1, 39)], [(4, 64), (1, 39), (3, 48)]):
        scene = Scene(batch, 4, 2, 4)
        layer = scene.layer(**options)
        clean = scene.attend(layer)
        for row, (count, total) in enumerate(batch):
            first = total - count  # the first query
            reach = first + 1 - 8 if "window" in options else first - first % 8
            scene.cache.rows[0].view(-1, 4, 64)[scene.metadata.block_tables[row, : reach // 4].long()] = math.nan
        assert torch.equal(scene.attend(layer), clean)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_values_inside_of_keys(batch: list[tuple[int, int]]) -> None:
    """Latent attention: a value is the beginning of its key, and nothing else is stored."""
    scene = Scene(batch, 4, 1, block_size=4)
    key_rows = [rows.clone() for rows in scene.cache.rows]
    shape = KvShape(1, 16, 12, value_in_key=True)
    scene.cache = KvCache((shape,), scene.cache.num_blocks, 4, torch.float32, CPU)
    scene.cache.rows[0].copy_(key_rows[0][:, :16])
    scene.values = tuple(key[..., :12] for key in scene.keys)
    layer = scene.layer()
    step = ReferenceBackend().start(scene.metadata, scene.cache)
    actual = step.attend(layer, scene.query, scene.new_key, scene.new_key[..., :12])
    expected = naive(layer, scene.query, scene.keys, scene.values, batch)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
