"""Attention to chosen keys, whose table lists slots, by our kernels against the definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.sparse_scene import SparseScene

from model_server.attention.triton_paged import TritonBackend

BATCHES = {
    "single queries": [(1, 2), (1, 5), (1, 6), (1, 30)],
    "prompts beside them": [(1, 4), (7, 17), (1, 19), (6, 6), (4, 7)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_definition(device: torch.device, batch: list[tuple[int, int]], dtype: torch.dtype) -> None:
    scene = SparseScene(batch, dtype, device)
    actual, expected = scene.attend(TritonBackend()).double(), scene.expected()
    limit = 1e-2 if dtype is torch.bfloat16 else 1e-5
    assert float((actual - expected).norm() / expected.norm()) < limit
