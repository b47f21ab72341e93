"""Norm kernels against float64, and against the plain torch that they stand in for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.kernels import norm
from model_server.layers.norm import LayerNorm, RmsNorm

# Relative error of a whole result; the interpreter cuts bfloat16 off where a card rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SHAPES = [(1, 64), (1, 1), (3, 77), (2, 1000), (17, 128), (1, 4544), (5, 8192)]


def error(actual: Tensor, wanted: Tensor) -> float:
    """NaN wherever an element was not written."""
    return float((actual.double() - wanted).norm() / wanted.norm())


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the launch functions take is full of NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison(monkeypatch)


def made(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device, dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], None, eps) * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_rms_norm(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = made(device, dtype, rows, size), made(device, torch.float32, size)
    result = norm.rms_norm(x, weight, 1e-5)
    assert (result.dtype, result.shape) == (dtype, x.shape)
    assert error(result, rms(x, weight, 1e-5)) < TOLERANCE[dtype]
    assert error(RmsNorm(weight, 1e-5)(x), result.double()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_add_rms_norm(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
    hidden, added = (made(device, dtype, rows, size) for _ in range(2))
    before, summand, weight = hidden.clone(), added.clone(), made(device, torch.float32, size)
    total, normed = norm.add_rms_norm(hidden, added, weight, 1e-5)
    assert torch.equal(hidden, before)
    assert total.data_ptr() == added.data_ptr()
    assert error(total, before.double() + summand.double()) < TOLERANCE[dtype]
    # Of the sum as it was rounded.
    assert error(normed, rms(total, weight, 1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 3, 80), (5, 12, 128), (33, 1, 64), (2, 40, 6)])
def test_rms_norm_of_heads_in_a_wider_row(
    device: torch.device, tokens: int, heads: int, dim: int, per_head: bool
) -> None:
    buffer = made(device, torch.bfloat16, tokens, (heads + 2) * dim + 8)
    x = buffer[:, dim : (heads + 1) * dim].view(tokens, heads, dim)
    weight = made(device, torch.float32, *((heads, dim) if per_head else (dim,)))
    result = norm.rms_norm(x, weight, 1e-6)
    assert result.is_contiguous()
    assert error(result, rms(x, weight, 1e-6)) < TOLERANCE[torch.bfloat16]


def test_rms_norm_of_a_part_of_each_row(device: torch.device) -> None:
    x, weight = made(device, torch.float32, 4, 50)[:, 7:31], made(device, torch.float32, 24)
    assert error(norm.rms_norm(x, weight, 1e-6), rms(x, weight, 1e-6)) < 1e-6


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_rms_norm_of_small_and_large_numbers(device: torch.device, scale: float) -> None:
    x, weight = made(device, torch.float32, 4, 24) * scale, made(device, torch.float32, 24)
    assert error(norm.rms_norm(x, weight, 1e-6), rms(x, weight, 1e-6)) < 2e-6
    assert not norm.rms_norm(torch.zeros_like(x), weight, 1e-6).any()


@pytest.mark.parametrize("given", ["nothing", "weight", "both"])
@pytest.mark.parametrize(("shape", "per_head"), [((3, 77), False), ((9, 5, 20), False), ((9, 5, 20), True)])
def test_layer_norm(device: torch.device, shape: tuple[int, ...], per_head: bool, given: str) -> None:
    x = made(device, torch.float32, *shape) + 3
    weight, bias = (made(device, torch.float32, *shape[int(not per_head) - 2 :]) for _ in range(2))
    arguments = (None if given == "nothing" else weight, bias if given == "both" else None)
    wanted = F.layer_norm(x.double(), shape[-1:], None, None, 1e-5)
    wanted = wanted if given == "nothing" else wanted * weight.double()
    wanted = wanted + bias.double() if given == "both" else wanted
    assert error(norm.layer_norm(x, *arguments, 1e-5), wanted) < 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_add_layer_norm(device: torch.device, dtype: torch.dtype) -> None:
    hidden, added = (made(device, dtype, 3, 100) for _ in range(2))
    weight, bias = (made(device, torch.float32, 100) for _ in range(2))
    total, normed = norm.add_layer_norm(hidden, added, weight, bias, 1e-5)
    wanted = F.layer_norm(total.double(), (100,), weight.double(), bias.double(), 1e-5)
    assert error(normed, wanted) < TOLERANCE[dtype]
    if dtype == torch.float32:
        assert error(LayerNorm(weight, bias, 1e-5)(total), normed.double()) < 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_sum_from_another_stage_gives_the_norm_of_one_formed_here(device: torch.device, dtype: torch.dtype) -> None:
    """To the bit in the interpreter, which cuts off the sums of bfloat16 that torch rounds. On a card, where both forms
    may add up a row in other orders, to the last one."""
    hidden, added = (made(device, dtype, 5, 100) for _ in range(2))
    weight, bias = (made(device, torch.float32, 100) for _ in range(2))
    for add, alone in (
        (norm.add_rms_norm, norm.rms_norm),
        (norm.add_layer_norm, norm.layer_norm),
    ):
        constants = (weight, 1e-5) if add is norm.add_rms_norm else (weight, bias, 1e-5)
        total, normed = add(hidden, added.clone(), *constants)
        allowed = torch.finfo(dtype).eps if device.type == "cuda" else 0.0
        torch.testing.assert_close(alone(total, *constants), normed, rtol=2 * allowed, atol=allowed)
        if dtype != torch.bfloat16 or device.type == "cuda":
            assert torch.equal(total, hidden + added)


def test_a_row_of_nan_stays_alone(device: torch.device) -> None:
    x, weight = made(device, torch.float32, 20, 64), made(device, torch.float32, 64)
    wanted = norm.rms_norm(x, weight, 1e-6)
    x[7] = float("nan")
    result = norm.rms_norm(x, weight, 1e-6)
    assert result[7].isnan().all()
    assert torch.equal(result[torch.arange(20) != 7], wanted[torch.arange(20) != 7])


def test_no_rows(device: torch.device) -> None:
    assert norm.rms_norm(made(device, torch.float32, 0, 8), made(device, torch.float32, 8), 1e-6).shape == (0, 8)


def test_what_has_no_kernel_is_refused(device: torch.device) -> None:
    x, weight = made(device, torch.float32, 4, 8), made(device, torch.float32, 8)
    with pytest.raises(ValueError, match="no kernel for the norm of a tensor"):
        norm.rms_norm(x.t(), weight, 1e-6)
    with pytest.raises(ValueError, match="does not fit"):
        norm.rms_norm(x, weight[:7], 1e-6)
    with pytest.raises(ValueError, match="no kernel for a sum of shapes"):
        norm.add_rms_norm(x, x[:2], weight, 1e-6)
    with pytest.raises(ValueError, match=r"no kernel for a sum of torch\.float32 and torch\.bfloat16"):
        norm.add_rms_norm(x, x.bfloat16(), weight, 1e-6)
