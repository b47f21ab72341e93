"""Attention to chosen keys alone, by every backend of a CPU, against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity.protocol import CPU
from support.sparse_scene import TOP_K, SparseScene

from model_server.attention.backend import AttentionBackend
from model_server.attention.choice import AttentionChoice
from model_server.attention.latent import LatentBackend
from model_server.attention.reference import ReferenceBackend

BACKENDS: dict[str, AttentionBackend] = {
    "reference": ReferenceBackend(),
    "GPU's reference": ReferenceBackend(exact=False),
    "chosen": AttentionChoice(None, CPU).for_layers(),
}
# (queries, tokens in all) of each sequence.
BATCHES = {
    "prompt": [(20, 20)],
    "few keys alone in some": [(3, 3), (9, 12), (5, 5)],
    "single queries": [(1, 2), (1, 5), (1, 6), (1, 30)],
    "chunks beside single queries": [(1, 4), (7, 17), (1, 19), (6, 6), (4, 7)],
}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_definition(batch: list[tuple[int, int]], backend: AttentionBackend) -> None:
    scene = SparseScene(batch)
    torch.testing.assert_close(scene.attend(backend).double(), scene.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_step_of_few_keys_is_not_sparse(backend: AttentionBackend) -> None:
    scene = SparseScene([(1, TOP_K), (TOP_K, TOP_K)])
    assert LatentBackend(backend).start(scene.metadata, scene.cache).sparse(TOP_K) is None


def test_a_prompts_queries_are_computed_alike_in_any_chunk() -> None:
    """Of one query too, with many keys or few; those that decode as ever."""
    scene = SparseScene([(2, TOP_K + 1), (1, 9), (1, 11), (1, 3)])
    object.__setattr__(scene.metadata, "single_prompts", np.array([0, 1, 0, 0], np.uint8))
    step = LatentBackend(ReferenceBackend()).start(scene.metadata, scene.cache).sparse(TOP_K)
    assert step is not None and step._rest.single_prompts is not None
    assert step._rest.single_prompts.tolist() == [1, 1, 0]
    assert step._dense is not None
    few = step._dense[1]._metadata.single_prompts  # type: ignore[attr-defined]
    assert few.tolist() == [1, 0]
