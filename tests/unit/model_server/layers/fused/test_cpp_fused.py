"""Fused element-wise operators as a CPU is given them, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from model_server.layers.fused.choice import fused_for
from model_server.layers.fused.fused import HeadLayout
from model_server.layers.fused.torch import TorchFused
from model_server.layers.rotary import Rotations

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 64), (1, 20), (50, 576)], ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, added = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[1])
    norm, plain = (f.rms_norm(weight, 1e-5) for f in (fused_for(CPU, dtype), TorchFused()))
    torch.testing.assert_close(norm(x), plain(x))
    got, expected = norm.add(x, added.clone()), plain.add(x, added.clone())
    torch.testing.assert_close(got, expected)
    # A stage of a pipeline that begins with this norm gets the sum, and goes on as if it had formed it itself.
    assert torch.equal(got[0], x + added)
    assert torch.equal(norm(x + added), got[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_heads(dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 6, 16).to(dtype), torch.randn(6, 16)
    norm, plain = (f.rms_norm(weight, 1e-5) for f in (fused_for(CPU, dtype), TorchFused()))
    torch.testing.assert_close(norm(x), plain(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gated(name: str, dtype: torch.dtype) -> None:
    for shape in ((1, 40), (9, 128), (300, 200)):
        gate_up = 5 * torch.randn(shape).to(dtype)
        got, expected = fused_for(CPU, dtype).gated(name)(gate_up), TorchFused().gated(name)(gate_up)
        torch.testing.assert_close(got, expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    extreme = torch.tensor([[-200.0, 200.0, 0.0, float("nan"), 1.0, 1.0, 1.0, 1.0]]).to(dtype)
    got = fused_for(CPU, dtype).gated("silu")(extreme)
    torch.testing.assert_close(got, TorchFused().gated("silu")(extreme), equal_nan=True, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [0, 12, 32, 64])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_rotate_write(normed: bool, rotary: int, dtype: torch.dtype) -> None:
    layout = HeadLayout(num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=rotary)
    table = torch.polar(torch.ones(50, max(rotary, 2) // 2), torch.randn(50, max(rotary, 2) // 2))
    positions, slots = torch.randint(0, 50, (9,)), torch.randperm(64)[:9]
    qkv = torch.randn(9, 8 * 64).to(dtype)
    weight = torch.randn(6, 64)
    results = []
    for fused in (fused_for(CPU, dtype), TorchFused()):
        own, rows = qkv.clone(), torch.zeros(64, 4 * 64, dtype=dtype)
        norm = fused.rms_norm(weight, 1e-6) if normed else None
        fused.rotate_write(own, layout, norm, Rotations(table, positions) if rotary else None, rows, slots)
        results.append((own, rows))
    torch.testing.assert_close(results[0], results[1], rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
