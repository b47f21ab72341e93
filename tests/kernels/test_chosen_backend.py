"""The word `triton` gives a backend with all that the engine asks of one, and it computes attention."""

from __future__ import annotations

import pytest
import torch
from support.attention_scene import BATCHES, Scene

from model_server.attention.choice import AttentionChoice
from model_server.attention.reference import ReferenceBackend
from model_server.memory.kv_cache import FLOAT8


def test_the_backend_is_whole(device: torch.device) -> None:
    scene = Scene(BATCHES["everything mixed"], 4, 2, 16, device=device)
    layer = scene.layer(window=8)
    backend = AttentionChoice("triton", device, torch.float32).for_layers([layer])
    assert (backend.name, backend.tgi_name, backend.block_size, backend.capturable) == ("triton", "paged", 16, True)
    torch.testing.assert_close(scene.attend(layer, backend).double().cpu(), scene.expected(layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", FLOAT8, ids=str)
def test_a_cache_in_float8(cache: torch.dtype, device: torch.device) -> None:
    """The layer's scales are those of what is stored; the reference, on the same bytes, is held to them elsewhere."""
    scene = Scene(BATCHES["everything mixed"], 4, 2, 16, cache, device=device)
    scene.query, scene.new_key, scene.new_value = (
        t.to(torch.bfloat16) for t in (scene.query, scene.new_key, scene.new_value)
    )
    layer = scene.layer(window=8, key_scale=0.5, value_scale=3.0)
    backend = AttentionChoice("triton", device, torch.bfloat16, cache).for_layers([layer])
    got, wanted = (scene.attend(layer, one).float() for one in (backend, ReferenceBackend()))
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
