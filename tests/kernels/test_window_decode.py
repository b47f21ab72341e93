"""Decode attention of windows: several queries of a sequence share a tile, and each sees keys up to its own."""

from __future__ import annotations

import math

import pytest
import torch
from paged_scene import SINKS, SLOPES, Scene, relative_error
from torch import Tensor

from model_server.attention.backend import Alibi, AttentionLayer
from model_server.kernels.attention import decode_config
from model_server.kernels.attention.decode import paged_decode

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def few_processors(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(decode_config, "num_processors", lambda device: 2)


def windows(scene: Scene, layer: AttentionLayer, places: int, valid: list[int], num_splits: int | None) -> Tensor:
    """What the kernel makes of a scene of sequences with `places` queries each, of which `valid` are no padding."""
    rows, metadata, device = scene.cache.rows[0], scene.metadata, scene.query.device
    config = decode_config.decode_config(
        layer, value_in_key=scene.shape.value_in_key, cache_dtype=rows.dtype, device=rows.device,
        num_splits=num_splits, places=places,
    )  # fmt: skip
    first = metadata.kv_lengths[:, None] - places + 1
    lengths = first + torch.arange(places, dtype=torch.int32, device=device)
    padding = torch.arange(places, device=device) >= torch.tensor(valid, device=device)[:, None]
    lengths = lengths.masked_fill(padding, 1).view(-1)
    tables = metadata.block_tables.repeat_interleave(places, 0).masked_fill(padding.view(-1, 1), 0)
    cu_seqlens = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    plan = decode_config.plan_rows(config, layer, lengths, cu_seqlens, len(lengths))
    out = scene.query.new_full((len(scene.query), layer.num_heads * layer.value_dim), math.nan)
    keys, values = scene.cache.keys[0], scene.cache.values[0]
    paged_decode(scene.query, keys, values, tables, plan, layer, config, out=out, kv_lengths=lengths)
    assert not plan.arrivals.any()
    return out


def check(scene: Scene, layer: AttentionLayer, places: int, valid: list[int], num_splits: int | None = None) -> None:
    found = windows(scene, layer, places, valid, num_splits)
    kept = torch.cat([torch.arange(n) + places * row for row, n in enumerate(valid)])
    expected = scene.expected(layer)
    assert relative_error(found[kept.to(found.device)], expected[kept]) < LIMITS[scene.query.dtype]
    assert found.isfinite().all(), "what padding gives goes on through the layers"


@pytest.mark.parametrize(
    ("heads", "places"),
    [((4, 4), 4), ((8, 2), 2), ((8, 2), 6), pytest.param((71, 1), 3, marks=pytest.mark.slow)],
    ids=str,
)
def test_each_query_sees_the_keys_up_to_its_own(heads: tuple[int, int], places: int, device: torch.device) -> None:
    scene = Scene([(places, 300), (places, 40), (places, places + 1)], device, heads=heads)
    check(scene, scene.layer(), places, [places] * 3, num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 3, None])
def test_padding_behind_a_draft(num_splits: int | None, device: torch.device) -> None:
    """The last item of a sequence may hold keys that its first queries do not see."""
    lengths = [257, 130, 129, 33, 7]
    scene = Scene([(4, n) for n in lengths], device, heads=(8, 2), dtype=torch.float16, dim=64)
    check(scene, scene.layer(), 4, [4, 1, 2, 3, 1], num_splits)


@pytest.mark.parametrize("kind", ["sinks", "alibi", "softcap"])
def test_what_layers_ask_for(kind: str, device: torch.device) -> None:
    scene = Scene([(3, 140), (3, 20)], device, heads=(8, 2))
    asked = {
        "sinks": {"sinks": SINKS[:8].to(device)},
        "alibi": {"alibi": Alibi(SLOPES[:8].to(device))},
        "softcap": {"softcap": 5.0},
    }[kind]
    check(scene, scene.layer(**asked), 3, [3, 3], num_splits=2)
