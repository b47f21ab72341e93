"""Latent attention in both forms, by every backend of a CPU, against its definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from parity.protocol import CPU
from support.latent_scene import HEADS, PLAIN, ROTATED, VALUE, LatentScene, latent_layer
from torch import Tensor

from model_server.attention import latent
from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.attention.choice import AttentionChoice
from model_server.attention.latent import LatentHeads, is_expanded
from model_server.attention.metadata import AttentionMetadata
from model_server.attention.reference import ReferenceBackend, ReferenceStep
from model_server.memory.kv_cache import KvCache

BACKENDS: dict[str, AttentionBackend] = {
    "reference": ReferenceBackend(),
    "chosen": AttentionChoice(None, CPU).for_layers(),
}
BATCHES = {
    "prompt": [(50, 50)],
    "prompts": [(7, 7), (33, 33), (2, 2)],
    "after a prefix": [(40, 57), (90, 120)],
    "absorbed after a long prefix": [(5, 100), (9, 140)],
    "beside decode": [(1, 30), (1, 1), (40, 60)],
    "in any order": [(1, 30), (20, 20), (3, 90), (60, 75), (1, 17), (18, 18)],
}
# Where a token of all heads takes 6 * 28 numbers: some sequences at once; a few heads of a sequence; a single one.
BOUNDS = {"whole": latent.MAX_EXPANDED_BYTES, "parts": 50_000, "some heads": 20_000, "one head": 1}


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_definition(
    batch: list[tuple[int, int]], backend: AttentionBackend, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "MAX_EXPANDED_BYTES", bound)
    scene = LatentScene(batch)
    actual, expected = scene.attend(backend), scene.expected()
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_bfloat16(backend: AttentionBackend) -> None:
    scene = LatentScene(BATCHES["in any order"], dtype=torch.bfloat16)
    actual, expected = scene.attend(backend), scene.expected()
    assert actual.dtype == torch.bfloat16
    assert float((actual - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("cuts", [(0, 64, 96), (0, 3, 40, 41, 96), (0, 90, 96)], ids=["halves", "mixed", "few at last"])
def test_chunks_equal_the_whole(cuts: tuple[int, ...], backend: AttentionBackend) -> None:
    """Whatever form each of the chunks takes."""
    scene = LatentScene([(96, 96)])
    whole = scene.attend(backend)
    chunks = torch.cat([scene.attend(backend, [span]) for span in pairwise(cuts)])
    assert float((chunks - whole).abs().max() / whole.abs().max()) < 1e-5


class Counting(ReferenceBackend):
    """The reference, which takes down the shape of every call: number of queries, KV heads and width of a head."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def start(self, metadata: AttentionMetadata, cache: KvCache) -> ReferenceStep:
        step = CountingStep(metadata, cache)
        step.calls = self.calls
        return step


class CountingStep(ReferenceStep):
    calls: list[tuple[int, int, int]]

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls.append((len(query), layer.num_kv_heads, layer.head_dim))
        return super().attend(layer, query, key, value)


@pytest.mark.parametrize(
    ("batch", "calls"),
    [
        ([(1, 30), (1, 2)], [(2, 1, 32)]),
        ([(2, 2), (3, 3)], [(5, HEADS, 16)]),
        ([(1, 30), (17, 5000), (40, 60), (20, 20)], [(18, 1, 32), (60, HEADS, 16)]),
    ],
    ids=["decode", "prompts", "mixed"],
)
def test_rows_are_divided_by_their_form(batch: list[tuple[int, int]], calls: list[tuple[int, int, int]]) -> None:
    backend = Counting()
    LatentScene(batch).attend(backend)
    assert backend.calls == calls


def multiplications(rank: int, plain: int, rotated: int, value: int, queries: int, keys: int) -> tuple[int, int]:
    """Of one head, absorbed and expanded, counted pair by pair."""
    pairs = sum(range(keys - queries + 1, keys + 1))
    absorbed = queries * rank * plain + pairs * (rank + rotated + rank) + queries * rank * value
    return absorbed, keys * rank * (plain + value) + pairs * (plain + rotated + value)


@pytest.mark.parametrize("queries", [2, 17, 18, 60])
@pytest.mark.parametrize("prefix", [0, 1, 40, 5000])
def test_the_form_with_fewer_multiplications(queries: int, prefix: int) -> None:
    layer = latent_layer()
    absorbed, expanded = multiplications(layer.rank, PLAIN, ROTATED, VALUE, queries=queries, keys=prefix + queries)
    assert is_expanded(layer, queries, prefix + queries) == (expanded < absorbed)


def test_sizes_of_deepseek_v3() -> None:
    layer = latent_layer(LatentHeads(torch.zeros(1, 128, 512), torch.zeros(1, 512, 128)))
    assert is_expanded(layer, 2, 2)
    assert not is_expanded(layer, 1, 1)
    assert not is_expanded(layer, 170, 100_000)
    assert is_expanded(layer, 171, 100_000)


def test_heads_wider_than_latents_stay_absorbed() -> None:
    """Where keys and values are as wide as two latents, nothing is gained by making them."""
    layer = latent_layer(LatentHeads(torch.zeros(1, 16, 8), torch.zeros(1, 8, 16)))
    assert not is_expanded(layer, 100, 100)
