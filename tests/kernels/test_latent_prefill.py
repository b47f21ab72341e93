"""Prompts of latent attention in the expanded form, by our kernels, against the definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.latent_scene import LatentScene

from model_server.attention import latent
from model_server.attention.triton_paged import TritonBackend

BATCHES = {
    "prompts": [(7, 7), (33, 33), (2, 2)],
    "beside decode": [(1, 30), (20, 20), (3, 60), (40, 55)],
}


@pytest.mark.parametrize("bound", [latent.MAX_EXPANDED_BYTES, 20_000], ids=["whole", "some heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_equals_the_definition(
    device: torch.device,
    batch: list[tuple[int, int]],
    dtype: torch.dtype,
    bound: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent, "MAX_EXPANDED_BYTES", bound)
    scene = LatentScene(batch, dtype=dtype, device=device)
    actual, expected = scene.attend(TritonBackend()).double(), scene.expected()
    limit = 1e-2 if dtype is torch.bfloat16 else 1e-5
    assert float((actual - expected).norm() / expected.norm()) < limit
