"""The word `triton` gives a backend with all that the engine asks of one, and it computes attention."""

from __future__ import annotations

import torch
from support.attention_scene import BATCHES, Scene

from model_server.attention.choice import AttentionChoice


def test_the_backend_is_whole(device: torch.device) -> None:
    scene = Scene(BATCHES["everything mixed"], 4, 2, 16, device=device)
    layer = scene.layer(window=8)
    backend = AttentionChoice("triton", device, torch.float32).for_layers([layer])
    assert (backend.name, backend.tgi_name, backend.block_size, backend.capturable) == ("triton", "paged", 16, True)
    torch.testing.assert_close(scene.attend(layer, backend).double().cpu(), scene.expected(layer), rtol=1e-5, atol=1e-5)
