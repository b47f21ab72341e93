"""Every attention backend that can be had on this card against attention written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.attention_scene import BATCHES, HEADS, Scene
from torch import Tensor

from model_server.attention import choice
from model_server.attention.availability import UnavailableError
from model_server.attention.backend import Alibi, AttentionLayer
from model_server.attention.choice import OWN_NAMES, Offer

LONG: dict[str, list[tuple[int, int]]] = {
    "many pages": [(1, 256), (1, 257), (1, 1900), (1, 1), (1, 512)],
    "chunk over pages": [(300, 900), (1, 513), (7, 7), (1, 1)],
    "many rows": [(1, 1 + 13 * i % 300) for i in range(257)],
}
SLOPES = torch.tensor([0.7, 0.31, 0.011, 0.17])
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 8},
    "long window": {"window": 300},
    "chunk": {"chunk": 64},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi": Alibi(SLOPES)},
    "Falcon's alibi": {"alibi": Alibi(SLOPES, 0.25)},
}
# ||result - truth|| / ||truth|| (gpu.md: bfloat16 < 1e-2, float32 < 1e-5); float16 keeps three bits more than bfloat16.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def offer(name: str, device: torch.device, dtype: torch.dtype) -> Offer:
    try:
        return choice._OFFERS[name](device, dtype)
    except UnavailableError as unavailable:
        pytest.skip(f"{name}: {unavailable}")


def on(device: torch.device, kind: dict[str, Any]) -> dict[str, Any]:
    """The layer's tensors where the kernels read them."""
    moved = dict(kind)
    if "sinks" in kind:
        moved["sinks"] = kind["sinks"].to(device)
    if "alibi" in kind:
        moved["alibi"] = Alibi(kind["alibi"].slopes.to(device), kind["alibi"].bfloat16_scale)
    return moved


def check(offered: Offer, scene: Scene, kind: dict[str, Any]) -> None:
    """Skips what the backend says it cannot do."""
    layer = scene.layer(scale=scene.query.shape[2] ** -0.5, **on(scene.query.device, kind))
    refusal = offered.refusal([layer])
    if refusal is not None:
        pytest.skip(refusal)
    result = scene.attend(layer, offered.backend)
    truth = scene.expected(scene.layer(scale=scene.query.shape[2] ** -0.5, **kind))
    assert result.dtype == scene.query.dtype
    assert error(result, truth) < TOLERANCE[result.dtype]


def error(result: Tensor, truth: Tensor) -> float:
    """Relative, in the Euclidean norm; infinite if anything is not finite."""
    difference = (result.double().cpu() - truth).norm() / truth.norm()
    return float(difference.nan_to_num(math.inf))


@pytest.mark.parametrize("batch", (BATCHES | LONG).values(), ids=(BATCHES | LONG))
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("name", OWN_NAMES)
def test_kinds_of_layers(name: str, kind: dict[str, Any], batch: list[tuple[int, int]], device: torch.device) -> None:
    offered = offer(name, device, torch.bfloat16)
    check(offered, Scene(batch, 4, 2, offered.backend.block_size, torch.bfloat16, dim=64, device=device), kind)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", OWN_NAMES)
def test_sizes_and_types(name: str, heads: tuple[int, int], dim: int, dtype: torch.dtype, device: torch.device) -> None:
    offered = offer(name, device, dtype)
    for batch in (BATCHES["decode, ragged"], BATCHES["everything mixed"]):
        check(offered, Scene(batch, *heads, offered.backend.block_size, dtype, dim=dim, device=device), {})


@pytest.mark.parametrize("name", OWN_NAMES)
def test_decode_in_a_graph(name: str, device: torch.device) -> None:
    """Captured with one batch, replayed with another of the same shape: new lengths and pages are honoured."""
    offered = offer(name, device, torch.bfloat16)
    if not getattr(offered.backend, "capturable", False):
        pytest.skip("its decode step needs the host")
    size = offered.backend.block_size
    first, second = (
        Scene(batch, 8, 2, size, torch.bfloat16, dim=128, device=device)
        for batch in ([(1, 3 * size), (1, 5), (1, 2 * size)], [(1, 2 * size + 7), (1, size + 3), (1, 1)])
    )
    layer = first.layer(scale=128**-0.5)
    eager = second.attend(layer, offered.backend)
    graph, result = captured(offered, first, layer)
    for tensor in ("block_tables", "kv_lengths", "slots", "cu_seqlens_q"):
        getattr(first.metadata, tensor).copy_(getattr(second.metadata, tensor))
    pages = second.cache.rows[0]
    assert len(pages) <= len(first.cache.rows[0])
    first.cache.rows[0][: len(pages)].copy_(pages)
    first.query.copy_(second.query)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(result, eager, rtol=1e-2, atol=1e-2)


def captured(offered: Offer, scene: Scene, layer: AttentionLayer) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Its attention as a graph, and where the graph writes. Run before, so that kernels are compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            scene.attend(layer, offered.backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = scene.attend(layer, offered.backend)
    return graph, result
