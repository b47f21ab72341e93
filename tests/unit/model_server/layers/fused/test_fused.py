"""The fused element-wise operators in plain torch: what every other implementation is tested against."""

from __future__ import annotations

import math

import pytest
import torch

from model_server.errors import StartupError
from model_server.layers.activation import clamped_swiglu, gated
from model_server.layers.fused.choice import fused_for
from model_server.layers.fused.cpp import CppFused
from model_server.layers.fused.fused import HeadLayout
from model_server.layers.fused.torch import TorchFused
from model_server.layers.norm import LayerNorm, RmsNorm
from model_server.layers.rotary import Rope, Rotary, rotate_

CPU = torch.device("cpu")
FUSED = TorchFused()


@pytest.mark.parametrize("here", [False, True])
def test_who_is_chosen(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_server.layers.fused.choice.availability.usable", lambda device: False)
    monkeypatch.setattr("model_server.layers.fused.choice.library.usable", lambda device, dtype: here)
    assert isinstance(fused_for(CPU, torch.float32), CppFused if here else TorchFused)


def test_no_kernel_computes_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_server.layers.fused.choice.availability.usable", lambda device: True)
    assert isinstance(fused_for(CPU, torch.float64), TorchFused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_sum_and_its_norm(kind: str, dtype: torch.dtype) -> None:
    hidden, added = torch.randn(3, 8, dtype=dtype), torch.randn(3, 8, dtype=dtype)
    weight, bias = torch.randn(8, dtype=dtype), torch.randn(8, dtype=dtype)
    norm = FUSED.rms_norm(weight, 1e-5) if kind == "rms" else FUSED.layer_norm(weight, bias, 1e-5)
    plain = RmsNorm(weight, 1e-5) if kind == "rms" else LayerNorm(weight, bias, 1e-5)
    before, wanted = hidden.clone(), hidden + added
    total, normed = norm.add(hidden, added)
    assert torch.equal(hidden, before)
    assert torch.equal(total, wanted)
    assert torch.equal(normed, plain(wanted))
    assert torch.equal(norm(wanted), normed)


def test_activations() -> None:
    x = torch.randn(3, 10)
    assert torch.equal(FUSED.gated("silu")(x), gated("silu")(x))
    assert torch.equal(FUSED.clamped_swiglu(1.7, 7.0)(x), clamped_swiglu(1.7, 7.0)(x))
    with pytest.raises(StartupError, match="'tanh' is not served"):
        FUSED.gated("tanh")


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
def test_rotate_write(rotary_dim: int, with_norm: bool) -> None:
    layout = HeadLayout(num_heads=3, num_kv_heads=2, head_dim=8, rotary_dim=rotary_dim)
    qkv, slots = torch.randn(2, 7 * 8), torch.tensor([4, 1])
    rows = torch.full((6, 4 * 8), math.nan)
    norm = FUSED.rms_norm(torch.randn(5, 8), 1e-6) if with_norm else None
    heads = qkv.view(2, 7, 8).clone()
    if norm is not None:
        heads[:, :5] = norm(heads[:, :5])
    rotations = None
    if rotary_dim:
        rotations = Rotary(Rope("default", 100.0, rotary_dim, 16), CPU).rotations(torch.tensor([3, 9]), 10)
        rotate_(heads[:, :5, :rotary_dim], rotations.gathered)
    FUSED.rotate_write(qkv, layout, norm, rotations, rows, slots)
    assert torch.equal(qkv.view(2, 7, 8), heads)
    assert torch.equal(rows[slots], heads[:, 3:].flatten(1))
    assert rows[[0, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_rows_are_scaled_and_bounded(cache: torch.dtype, dtype: torch.dtype) -> None:
    layout = HeadLayout(num_heads=3, num_kv_heads=2, head_dim=8, rotary_dim=0, key_scale=0.25, value_scale=2.0)
    qkv = torch.randn(2, 7 * 8, dtype=dtype)
    qkv[0, 3 * 8], qkv[1, -1] = 1e6, -1e6
    before = qkv.clone()
    rows = torch.zeros(4, 4 * 8, dtype=cache)
    FUSED.rotate_write(qkv, layout, None, None, rows, torch.tensor([3, 0]))
    assert torch.equal(qkv, before)
    bound, scales = torch.finfo(cache).max, torch.tensor([0.25, 2.0]).repeat_interleave(16)
    wanted = (before[:, 24:].float() / scales).clamp(-bound, bound).to(cache).float()
    assert torch.equal(rows[[3, 0]].float(), wanted)
    assert not rows[[1, 2]].float().any()
