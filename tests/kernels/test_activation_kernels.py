"""Gated activations against float64, and against the plain torch that they stand in for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from model_server.kernels import activation
from model_server.layers.activation import ACTIVATIONS, clamped_swiglu, gated

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))


def error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


def test_every_activation_has_a_kernel() -> None:
    assert activation.KINDS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(device: torch.device, name: str, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 2 * 130) * 4).to(device, dtype)
    result = activation.gated(name, gate_up)
    assert (result.dtype, result.shape) == (dtype, (5, 130))
    assert error(result, gated(name)(gate_up.double())) < TOLERANCE[dtype]
    assert error(result, gated(name)(gate_up.clone())) < TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 1024), (1, 1025), (3, 3000), (40, 7)])
def test_sizes(device: torch.device, rows: int, size: int) -> None:
    gate_up = torch.randn(rows, 2 * size).to(device)
    assert error(activation.gated("silu", gate_up), gated("silu")(gate_up.double())) < 1e-6


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    gate_up = torch.randn(4, 60).to(device)[:, 3:53]
    assert error(activation.gated("gelu", gate_up), gated("gelu")(gate_up.double())) < 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_clamped_swiglu(device: torch.device, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 2 * 130) * 6).to(device, dtype)
    result = activation.clamped_swiglu(gate_up, 1.702, 7.0)
    assert error(result, clamped_swiglu(1.702, 7.0)(gate_up.double())) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_numbers_and_nan(device: torch.device, name: str) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, math.nan, 1.0, 1.0, 1.0, 1.0, math.nan]], device=device)
    wanted = gated(name)(gate_up.double()).float()
    torch.testing.assert_close(activation.gated(name, gate_up), wanted, equal_nan=True)


def test_bounds_let_nan_through(device: torch.device) -> None:
    gate_up = torch.tensor([[math.nan, 1.0, 100.0, 1.0, math.nan, -100.0]], device=device)
    wanted = clamped_swiglu(1.7, 7.0)(gate_up.double()).float()
    torch.testing.assert_close(activation.clamped_swiglu(gate_up, 1.7, 7.0), wanted, equal_nan=True)


def test_no_rows(device: torch.device) -> None:
    assert activation.gated("silu", torch.zeros(0, 8, device=device)).shape == (0, 4)


@pytest.mark.parametrize("shape", [(3,), (3, 5)])
def test_what_has_no_kernel_is_refused(device: torch.device, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no kernel for an activation"):
        activation.gated("silu", torch.zeros(*shape, device=device))
