"""The reference backend against attention written out in float64, one query at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity.protocol import CPU, attention_metadata
from torch import Tensor

from model_server.attention import reference
from model_server.attention.backend import Alibi, AttentionLayer
from model_server.attention.metadata import AttentionMetadata
from model_server.attention.reference import ReferenceBackend
from model_server.kv_cache import KvCache, KvShape

# (query tokens, tokens in all) of each sequence.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one decode row": [(1, 9)],
    "first token": [(1, 1)],
    "decode, equal lengths": [(1, 7), (1, 7), (1, 7)],
    "decode, ragged": [(1, 1), (1, 16), (1, 17), (1, 40), (1, 5)],
    "one prompt": [(13, 13)],
    "prompts": [(9, 9), (2, 2), (20, 20)],
    "chunk on a prefix": [(6, 30), (4, 5)],
    "everything mixed": [(1, 12), (7, 7), (1, 1), (5, 33), (1, 33)],
}
HEADS = {"plain": (4, 4), "grouped": (4, 2), "one key head": (4, 1)}


def naive_bias(alibi: Alibi, head: int, keys: Tensor, position: int) -> Tensor:
    if alibi.bfloat16_scale is None:
        return alibi.slopes[head].double() * (keys - position)
    return (alibi.slopes[head].bfloat16() * keys).double() * alibi.bfloat16_scale


def naive(
    layer: AttentionLayer, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], batch: list[tuple[int, int]]
) -> Tensor:
    """float64, straight from the definition: softmax(softcap(q k scale) + bias, sink) v over the visible positions."""
    rows, row = [], 0
    for (count, total), key, value in zip(batch, keys, values, strict=True):
        for position in range(total - count, total):
            first = 0 if layer.window is None else max(0, position + 1 - layer.window)
            first = first if layer.chunk is None else position - position % layer.chunk
            heads = []
            for head in range(layer.num_heads):
                kv = head // (layer.num_heads // layer.num_kv_heads)
                scores = key[first : position + 1, kv].double() @ query[row, head].double() * layer.scale
                if layer.softcap is not None:
                    scores = layer.softcap * (scores / layer.softcap).tanh()
                if layer.alibi is not None:
                    scores = scores + naive_bias(layer.alibi, head, torch.arange(first, position + 1), position)
                if layer.sinks is not None:
                    scores = torch.cat((scores, layer.sinks[head : head + 1].double()))
                weights = scores.softmax(0)[: position + 1 - first]
                heads.append(weights @ value[first : position + 1, kv].double())
            rows.append(torch.cat(heads))
            row += 1
    return torch.stack(rows)


class Scene:
    """Random queries, keys and values of a batch, and a cache full of NaN wherever nothing was written."""

    def __init__(
        self,
        batch: list[tuple[int, int]],
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        value_dim: int = 16,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        dim = 16
        counts = [-(-total // block_size) for _, total in batch]
        blocks = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        tables = [[blocks.pop() for _ in range(n)] for n in counts]
        self.batch = batch
        self.metadata: AttentionMetadata = attention_metadata(tables, [(t - q, t) for q, t in batch], block_size)
        self.cache = KvCache((KvShape(num_kv_heads, dim, value_dim),), sum(counts) + 1, block_size, dtype, CPU)
        self.cache.rows[0].fill_(math.nan)
        everything = attention_metadata(tables, [(0, t) for _, t in batch], block_size)
        total = sum(t for _, t in batch)
        key, value = (
            torch.randn(total, num_kv_heads, width, generator=generator).to(dtype) for width in (dim, value_dim)
        )
        self.cache.write(0, everything.slots, key, value)
        self.keys, self.values = (t.split([n for _, n in batch]) for t in (key, value))
        self.query = torch.randn(sum(q for q, _ in batch), num_heads, dim, generator=generator).to(dtype)
        self.new_key, self.new_value = (
            torch.cat([t[n - q :] for t, (q, n) in zip(part, batch, strict=True)]) for part in (self.keys, self.values)
        )

    def layer(self, window: int | None = None, scale: float = 0.25, **options: Any) -> AttentionLayer:
        return AttentionLayer(
            index=0,
            num_heads=self.query.shape[1],
            num_kv_heads=self.keys[0].shape[1],
            head_dim=16,
            value_dim=self.values[0].shape[2],
            scale=scale,
            window=window,
            **options,
        )

    def attend(self, layer: AttentionLayer) -> Tensor:
        step = ReferenceBackend().begin(self.metadata, self.cache)
        return step.attend(layer, self.query, self.new_key, self.new_value)

    def expected(self, layer: AttentionLayer) -> Tensor:
        return naive(layer, self.query, self.keys, self.values, self.batch)


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
    step = ReferenceBackend().begin(scene.metadata, scene.cache)
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
    "everything": {"alibi": Alibi(SLOPES), "window": 8, "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


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
    step = ReferenceBackend().begin(scene.metadata, scene.cache)
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
    step = ReferenceBackend().begin(scene.metadata, scene.cache)
    actual = step.attend(layer, scene.query, scene.new_key, scene.new_key[..., :12])
    expected = naive(layer, scene.query, scene.keys, scene.values, batch)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
