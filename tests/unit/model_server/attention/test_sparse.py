"""Attention to chosen keys alone, by every backend of a CPU, against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from parity.protocol import CPU, attention_metadata
from torch import Tensor

from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.attention.choice import AttentionChoice
from model_server.attention.latent import LatentBackend
from model_server.attention.reference import ReferenceBackend
from model_server.memory.kv_cache import KvCache, KvShape

BACKENDS: dict[str, AttentionBackend] = {
    "reference": ReferenceBackend(),
    "GPU's reference": ReferenceBackend(exact=False),
    "chosen": AttentionChoice(None, CPU).for_layers(),
}
HEADS, WIDTH, RANK, INDEX, PAGE = 6, 32, 24, 8, 4
LAYER = AttentionLayer(index=0, num_heads=HEADS, num_kv_heads=1, head_dim=WIDTH, value_dim=RANK, scale=0.2)
SHAPE = KvShape(1, WIDTH, RANK, value_in_key=True, index_dim=INDEX)
TOP_K = 5
# (queries, tokens in all) of each sequence.
BATCHES = {
    "prompt": [(20, 20)],
    "few keys alone in some": [(3, 3), (9, 12), (5, 5)],
    "single queries": [(1, 2), (1, 5), (1, 6), (1, 30)],
    "chunks beside single queries": [(1, 4), (7, 17), (1, 19), (6, 6), (4, 7)],
}


class Scene:
    """Sequences whose blocks are in any order, in a cache that is NaN elsewhere."""

    def __init__(self, batch: list[tuple[int, int]]) -> None:
        noise = torch.Generator().manual_seed(len(batch))
        self.batch = batch
        self.rows = [torch.randn(total, WIDTH, generator=noise) for _, total in batch]
        self.query = torch.randn(sum(n for n, _ in batch), HEADS, WIDTH, generator=noise)
        counts = [-(-total // PAGE) for _, total in batch]
        blocks = (torch.randperm(sum(counts), generator=noise) + 1).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        self.cache = KvCache((SHAPE,), sum(counts) + 1, PAGE, torch.float32, CPU)
        self.cache.rows[0].fill_(math.nan)
        for table, rows in zip(self.tables, self.rows, strict=True):
            for i, row in enumerate(rows):
                self.cache.rows[0][table[i // PAGE] * PAGE + i % PAGE, :WIDTH] = row
        spans = [(total - queries, total) for queries, total in batch]
        self.metadata = attention_metadata(self.tables, spans, PAGE)
        self.key = torch.cat([rows[a:b] for rows, (a, b) in zip(self.rows, spans, strict=True)]).unsqueeze(1)

    def places(self, sequence: int, position: int) -> list[int]:
        """What a query attends to: every other key, the newest first."""
        if position < TOP_K:
            return list(range(position + 1))
        return [(position - 3 * i) % (position + 1) for i in range(TOP_K)]

    def expected(self) -> Tensor:
        found, row = [], 0
        for sequence, (queries, total) in enumerate(self.batch):
            for position in range(total - queries, total):
                keys = self.rows[sequence][self.places(sequence, position)].double()
                weights = (self.query[row].double() @ keys.T * LAYER.scale).softmax(-1)
                found.append((weights @ keys[:, :RANK]).flatten())
                row += 1
        return torch.stack(found)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_definition(batch: list[tuple[int, int]], backend: AttentionBackend) -> None:
    scene = Scene(batch)
    step = LatentBackend(backend, is_sparse=True).start(scene.metadata, scene.cache).sparse(TOP_K)
    assert step is not None
    asked = [(i, p) for i, (n, total) in enumerate(batch) for p in range(total - n, total) if p >= TOP_K]
    chosen = [[scene.tables[i][k // PAGE] * PAGE + k % PAGE for k in scene.places(i, p)] for i, p in asked]
    assert sum(len(one.visible) for one in step.sequences) == len(asked)
    for one in step.sequences:
        first_sequence, _ = asked[one.rows.start]
        assert one.visible.flatten().tolist() == [p + 1 for _, p in asked[one.rows]]
        assert len(one.slots) == batch[first_sequence][1]
        table = scene.tables[first_sequence]
        assert one.slots.tolist() == [table[k // PAGE] * PAGE + k % PAGE for k in range(len(one.slots))]
    step.choose(torch.tensor(chosen, dtype=torch.int32))
    actual = step.attend(LAYER, scene.query, scene.key, scene.key[..., :RANK])
    torch.testing.assert_close(actual.double(), scene.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_step_of_few_keys_is_not_sparse(backend: AttentionBackend) -> None:
    scene = Scene([(1, TOP_K), (TOP_K, TOP_K)])
    assert LatentBackend(backend).start(scene.metadata, scene.cache).sparse(TOP_K) is None


def test_a_prompts_queries_are_computed_alike_in_any_chunk() -> None:
    """Of one query too, with many keys or few; those that decode as ever."""
    scene = Scene([(2, TOP_K + 1), (1, 9), (1, 11), (1, 3)])
    object.__setattr__(scene.metadata, "single_prompts", np.array([0, 1, 0, 0], np.uint8))
    step = LatentBackend(ReferenceBackend()).start(scene.metadata, scene.cache).sparse(TOP_K)
    assert step is not None and step._rest.single_prompts is not None
    assert step._rest.single_prompts.tolist() == [1, 1, 0]
    assert step._dense is not None
    few = step._dense[1]._metadata.single_prompts  # type: ignore[attr-defined]
    assert few.tolist() == [1, 0]
